// SPDX-License-Identifier: GPL-2.0
/*
 * A driver for QEMU's edu device, for tests of cuttlefs_iommu: it imports a dma-buf as a NIC's driver does, and lets the device do DMA to and from
 * it. A transfer takes 100 ms, because QEMU's device waits that long.
 */
#include <linux/delay.h>
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "edu_dma.h"

/* The device's address of its own buffer. */
#define OWN_BUFFER 0x40000
#define SOURCE 0x80
#define DESTINATION 0x88
#define COUNT 0x90
#define COMMAND 0x98
#define RUN 1
#define FROM_DEVICE 2

static struct edu {
	struct pci_dev *pdev;
	void __iomem *registers;
	struct mutex lock;
	void *bounce;
	dma_addr_t bounce_at;
	struct dma_buf *dmabuf;
	struct dma_buf_attachment *attachment;
	struct sg_table *table;
	dma_addr_t at;
} *edu;

/* Protects `edu`, which is set while the device has this driver. */
static DEFINE_MUTEX(edu_lock);

static int run(dma_addr_t at, u32 len, bool from_device)
{
	int i;

	lo_hi_writeq(from_device ? OWN_BUFFER : at, edu->registers + SOURCE);
	lo_hi_writeq(from_device ? at : OWN_BUFFER, edu->registers + DESTINATION);
	lo_hi_writeq(len, edu->registers + COUNT);
	lo_hi_writeq(RUN | (from_device ? FROM_DEVICE : 0), edu->registers + COMMAND);
	for (i = 0; i < 20000; i++) {
		if (!(readl(edu->registers + COMMAND) & RUN))
			return 0;
		usleep_range(500, 1000);
	}
	return -ETIMEDOUT;
}

static void let_go(void)
{
	if (!edu->dmabuf)
		return;
	dma_buf_unmap_attachment_unlocked(edu->attachment, edu->table, DMA_TO_DEVICE);
	dma_buf_detach(edu->dmabuf, edu->attachment);
	dma_buf_put(edu->dmabuf);
	edu->dmabuf = NULL;
}

static int register_buffer(s32 fd)
{
	struct dma_buf_attachment *attachment;
	struct dma_buf *dmabuf;
	struct sg_table *table;

	let_go();
	if (fd < 0)
		return 0;
	dmabuf = dma_buf_get(fd);
	if (IS_ERR(dmabuf))
		return PTR_ERR(dmabuf);
	attachment = dma_buf_attach(dmabuf, &edu->pdev->dev);
	if (IS_ERR(attachment)) {
		dma_buf_put(dmabuf);
		return PTR_ERR(attachment);
	}
	table = dma_buf_map_attachment_unlocked(attachment, DMA_TO_DEVICE);
	if (IS_ERR(table)) {
		dma_buf_detach(dmabuf, attachment);
		dma_buf_put(dmabuf);
		return PTR_ERR(table);
	}
	edu->dmabuf = dmabuf;
	edu->attachment = attachment;
	edu->table = table;
	edu->at = sg_dma_address(table->sgl);
	return 0;
}

static int transfer(unsigned int command, void __user *argument)
{
	struct edu_dma_transfer wanted;
	int result;

	if (!edu->dmabuf)
		return -ENXIO;
	if (copy_from_user(&wanted, argument, sizeof(wanted)))
		return -EFAULT;
	if (wanted.len > EDU_DMA_MAX_BYTES)
		return -EINVAL;
	if (copy_from_user(edu->bounce, u64_to_user_ptr(wanted.buffer), wanted.len))
		return -EFAULT;
	result = run(edu->bounce_at, wanted.len, false);
	if (!result)
		result = run(edu->at + wanted.offset, wanted.len, command == EDU_DMA_WRITE);
	if (result || command == EDU_DMA_WRITE)
		return result;
	memset(edu->bounce, 0, PAGE_SIZE);
	result = run(edu->bounce_at, wanted.len, true);
	if (!result && copy_to_user(u64_to_user_ptr(wanted.buffer), edu->bounce, wanted.len))
		result = -EFAULT;
	return result;
}

static long edu_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	void __user *at = (void __user *)argument;
	long result = -ENOTTY;
	s32 fd;

	mutex_lock(&edu_lock);
	if (!edu)
		result = -ENODEV;
	else if (command == EDU_DMA_REGISTER)
		result = get_user(fd, (s32 __user *)at) ? -EFAULT : register_buffer(fd);
	else if (command == EDU_DMA_READ || command == EDU_DMA_WRITE)
		result = transfer(command, at);
	mutex_unlock(&edu_lock);
	return result;
}

static const struct file_operations fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = edu_ioctl,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "edu_dma",
	.mode = 0600,
	.fops = &fops,
};

static int edu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct edu *made = devm_kzalloc(&pdev->dev, sizeof(*made), GFP_KERNEL);
	int result;

	if (!made)
		return -ENOMEM;
	result = pcim_enable_device(pdev);
	if (result)
		return result;
	pci_set_master(pdev);
	/* The mask that QEMU's command line sets. */
	result = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(32));
	if (result)
		return result;
	made->registers = pcim_iomap(pdev, 0, 0);
	made->bounce = dmam_alloc_coherent(&pdev->dev, PAGE_SIZE, &made->bounce_at, GFP_KERNEL);
	if (!made->registers || !made->bounce)
		return -ENOMEM;
	made->pdev = pdev;
	mutex_lock(&edu_lock);
	if (edu)
		result = -EBUSY;
	else
		edu = made;
	mutex_unlock(&edu_lock);
	return result;
}

static void edu_remove(struct pci_dev *pdev)
{
	mutex_lock(&edu_lock);
	let_go();
	edu = NULL;
	mutex_unlock(&edu_lock);
	pci_clear_master(pdev);
}

static const struct pci_device_id ids[] = { { PCI_DEVICE(0x1234, 0x11e8) }, {} };
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = {
	.name = "edu_dma",
	.id_table = ids,
	.probe = edu_probe,
	.remove = edu_remove,
};

static int __init edu_dma_init(void)
{
	int result = pci_register_driver(&driver);

	if (result)
		return result;
	result = misc_register(&device);
	if (result)
		pci_unregister_driver(&driver);
	return result;
}

static void __exit edu_dma_exit(void)
{
	misc_deregister(&device);
	pci_unregister_driver(&driver);
}

module_init(edu_dma_init);
module_exit(edu_dma_exit);
MODULE_DESCRIPTION("QEMU's edu device as a NIC that registered a dma-buf, for tests");
MODULE_AUTHOR("the cuttlefs authors");
MODULE_LICENSE("GPL");
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
