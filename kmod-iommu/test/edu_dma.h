/* SPDX-License-Identifier: GPL-2.0 WITH Linux-syscall-note */
/* What tests say to /dev/edu_dma: QEMU's edu device as a NIC that registered a dma-buf. */
#ifndef EDU_DMA_H
#define EDU_DMA_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* QEMU 7.2 ends itself at 4096: its check of the range is off by one. */
#define EDU_DMA_MAX_BYTES 4088

struct edu_dma_transfer {
	/* Bytes behind the start of the dma-buf; nothing checks that they are in it. */
	__u64 offset;
	/* Address of the caller's buffer of `len` bytes. */
	__u64 buffer;
	__u32 len;
	__u32 unused;
};

/* The descriptor of the dma-buf that transfers are about from now on; -1 lets go of it. */
#define EDU_DMA_REGISTER _IOW('e', 0x90, __s32)
/* The device reads, and the caller gets, what it has then: what `buffer` held before, where it read nothing. */
#define EDU_DMA_READ _IOWR('e', 0x91, struct edu_dma_transfer)
/* The device writes the caller's buffer. */
#define EDU_DMA_WRITE _IOW('e', 0x92, struct edu_dma_transfer)

#endif
