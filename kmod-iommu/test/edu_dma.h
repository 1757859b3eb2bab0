/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/* The interface of /dev/edu_dma for tests: QEMU's edu device in the place of a NIC that registered a dma-buf. */
#ifndef EDU_DMA_H
#define EDU_DMA_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* QEMU 7.2 exits at 4096, because its check of the range is off by one. */
#define EDU_DMA_MAX_BYTES 4088

struct edu_dma_transfer {
	/* Offset from the start of the dma-buf; nothing checks that it lies inside. */
	__u64 offset;
	/* Address of the caller's buffer of `len` bytes. */
	__u64 buffer;
	__u32 len;
	__u32 unused;
};

/* Sets the dma-buf of all further transfers by its descriptor; -1 releases it. */
#define EDU_DMA_REGISTER _IOW('e', 0x90, __s32)
/* The device reads; then the caller gets the device's buffer. Bytes that the device could not read stay as they were in `buffer`. */
#define EDU_DMA_READ _IOWR('e', 0x91, struct edu_dma_transfer)
/* The device writes the bytes of the caller's buffer. */
#define EDU_DMA_WRITE _IOW('e', 0x92, struct edu_dma_transfer)

#endif
