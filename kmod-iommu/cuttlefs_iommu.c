// SPDX-License-Identifier: GPL-2.0
/*
 * cuttlefs_iommu: windows of fixed IOVAs, whose pages change.
 *
 * A window is a range of IOVAs of one PCI device. Its addresses stay, but what each of its pages points to changes: a page of the owner's arena (a
 * range of the owner's memory), or, while the page is gone, the magic page (in a window for reading) or a black hole (in a window for writing). So a
 * NIC registers the window once, and reads the magic pattern for a page that is on the SSD (NP-RDMA section 3.1.1: signature and black-hole pages).
 *
 * Addresses. The DMA API gives the range when the window is made: one mapping with as many pages, all of which are the gone page. Behind its back the
 * window then changes single entries of the device's default domain, with iommu_unmap() and iommu_map(), and restores the gone page before the DMA
 * API gets the range back. No driver of a NIC is changed: it gets the range as a dma-buf (for a NIC: ibv_reg_dmabuf_mr()).
 *
 * No page is pinned. A page of the arena is looked up with get_user_pages_fast(), mapped, and released at once; an MMU interval notifier over the
 * arena points its window page to the gone page before the kernel takes it away. Look-up and notifier are ordered, under the window's lock, by the
 * sequence count of mmu_interval_read_begin().
 *
 * The hole. IOMMU drivers differ in what iommu_map() over a live entry does (Intel, 6.12: nothing, with a warning; AMD, 6.12: replaces it; on 7.2
 * both refuse), so an entry is unmapped, the IOTLB flushed, and the entry mapped again. A device that accesses the page in between (microseconds)
 * faults: its transfer fails, as if the page had been unmapped. It never gets other bytes. The entries of a batch have their holes at the same time,
 * and one flush. The initiator of a transfer has to try again.
 *
 * Locks, outermost first: device_lock(the device), windows_lock, window.lock. Under window.lock nothing is allocated with GFP_KERNEL and no memory of
 * a user is accessed, because the notifier takes that lock in reclaim.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/dma-buf.h>
#include <linux/dma-map-ops.h>
#include <linux/dma-mapping.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/kref.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/mmu_notifier.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "cuttlefs_iommu.h"

/* Value in `target`: the IOMMU refused to map the page again. */
#define HOLE 0xfffffffeu
#define GONE CUTTLEFS_IOMMU_GONE
/* Value in `holder`: no page of the window points there. */
#define NOBODY 0xffffffffu

/* Pages whose entries change with one flush of the IOTLB: the more, the longer each hole. */
#define BATCH 16

static unsigned int hole_us;
module_param(hole_us, uint, 0600);
MODULE_PARM_DESC(hole_us, "for tests: microseconds, at most 100000, that an entry stays unmapped while it changes");

struct window {
	/* References of the open file, and of each dma-buf. */
	struct kref ref;
	struct list_head in_windows;
	struct pci_dev *pdev;
	struct iommu_domain *domain;
	struct sg_table reserved;
	enum dma_data_direction direction;
	int prot;
	dma_addr_t iova;
	u32 pages;
	u32 arena_pages;
	unsigned long arena_start;
	/* The magic page or the black hole. */
	struct page *gone;
	struct mmu_interval_notifier arena;

	/* Protects the fields below. */
	struct mutex lock;
	/* Whether the window has its IOVAs. Cleared, with all pages gone, when the device loses its driver. */
	bool has_device;
	/* Whether the file is open. Cleared, with all pages gone, when it is closed. */
	bool is_open;
	/* For each page of the window, the page of the arena that it points to. */
	u32 *target;
	/* For each page of the arena, the page of the window that points to it. */
	u32 *holder;
	u32 shown;
	u32 holes;
	u64 pointed;
	u64 taken;
	u64 invalidations;
};

/* All windows, for the notifier of the PCI bus. */
static DEFINE_MUTEX(windows_lock);
static LIST_HEAD(windows);

/* The state of an open file. */
struct handle {
	struct mutex making;
	struct window *window;
};

/* Pages whose entries change together. */
struct batch {
	u32 count;
	u32 page[BATCH];
	u32 target[BATCH];
	phys_addr_t at[BATCH];
};

static phys_addr_t gone_at(const struct window *w)
{
	return page_to_phys(w->gone);
}

static void forget_target(struct window *w, u32 page)
{
	u32 target = w->target[page];

	if (target == HOLE) {
		w->holes--;
	} else if (target != GONE) {
		w->holder[target] = NOBODY;
		w->shown--;
	}
}

/* Changes the entries of a batch, in which no page occurs twice. Returns an error if the IOMMU left a hole. */
static int change(struct window *w, const struct batch *batch)
{
	struct iommu_iotlb_gather gather;
	unsigned int pause = min(READ_ONCE(hole_us), 100000u);
	int result = 0;
	u32 i;

	lockdep_assert_held(&w->lock);
	if (!batch->count)
		return 0;
	iommu_iotlb_gather_init(&gather);
	for (i = 0; i < batch->count; i++) {
		dma_addr_t iova = w->iova + (dma_addr_t)batch->page[i] * PAGE_SIZE;

		if (w->target[batch->page[i]] != HOLE)
			WARN_ON_ONCE(iommu_unmap_fast(w->domain, iova, PAGE_SIZE, &gather) != PAGE_SIZE);
	}
	iommu_iotlb_sync(w->domain, &gather);
	if (pause)
		fsleep(pause);
	for (i = 0; i < batch->count; i++) {
		u32 page = batch->page[i], target = batch->target[i];
		dma_addr_t iova = w->iova + (dma_addr_t)page * PAGE_SIZE;
		/* The page tables of the range exist, so nothing is allocated; the notifier must not wait for memory. */
		int error = iommu_map(w->domain, iova, batch->at[i], PAGE_SIZE, w->prot, GFP_NOWAIT | __GFP_NOWARN);

		forget_target(w, page);
		if (error) {
			pr_err_ratelimited("the IOMMU does not map page %u again: %d\n", page, error);
			w->target[page] = HOLE;
			w->holes++;
			result = error;
			continue;
		}
		w->target[page] = target;
		if (target != GONE) {
			w->holder[target] = page;
			w->shown++;
		}
	}
	return result;
}

/* Points all window pages that point to these pages of the arena to the gone page; returns how many. */
static u32 take(struct window *w, u32 first, u32 end, bool may_sleep)
{
	struct batch batch = {};
	u32 taken = 0, i;

	for (i = first; i < end && w->shown; i++) {
		if (w->holder[i] == NOBODY) {
			if (may_sleep && !(i % 4096))
				cond_resched();
			continue;
		}
		batch.page[batch.count] = w->holder[i];
		batch.target[batch.count] = GONE;
		batch.at[batch.count] = gone_at(w);
		taken++;
		if (++batch.count == BATCH) {
			change(w, &batch);
			batch.count = 0;
		}
	}
	change(w, &batch);
	return taken;
}

static bool invalidate(struct mmu_interval_notifier *notifier, const struct mmu_notifier_range *range, unsigned long seq)
{
	struct window *w = container_of(notifier, struct window, arena);
	unsigned long arena_end = w->arena_start + (unsigned long)w->arena_pages * PAGE_SIZE;
	unsigned long start = max(range->start, w->arena_start), end = min(range->end, arena_end);
	bool may_sleep = mmu_notifier_range_blockable(range);
	u32 taken;

	/* If this fails, the oom killer's reaper tries again. */
	if (may_sleep)
		mutex_lock(&w->lock);
	else if (READ_ONCE(hole_us) || !mutex_trylock(&w->lock))
		return false;
	mmu_interval_set_seq(notifier, seq);
	if (start < end) {
		taken = take(w, (start - w->arena_start) >> PAGE_SHIFT, DIV_ROUND_UP(end - w->arena_start, PAGE_SIZE), may_sleep);
		w->taken += taken;
		w->invalidations += taken > 0;
	}
	mutex_unlock(&w->lock);
	return true;
}

static const struct mmu_interval_notifier_ops arena_ops = {
	.invalidate = invalidate,
};

/* Takes the range from the device: all pages are gone then, and the DMA API gets its range back. */
static void give_range_back(struct window *w)
{
	bool had_device;
	u32 page;

	mutex_lock(&w->lock);
	had_device = w->has_device;
	if (had_device) {
		take(w, 0, w->arena_pages, true);
		/* The DMA API unmaps the whole range, and warns of missing pages. */
		for (page = 0; w->holes && page < w->pages; page++) {
			struct batch batch = { .count = 1, .page = { page }, .target = { GONE }, .at = { gone_at(w) } };

			if (w->target[page] == HOLE)
				change(w, &batch);
		}
	}
	w->has_device = false;
	mutex_unlock(&w->lock);
	if (had_device)
		dma_unmap_sgtable(&w->pdev->dev, &w->reserved, w->direction, DMA_ATTR_SKIP_CPU_SYNC);
}

static void free_window(struct window *w)
{
	sg_free_table(&w->reserved);
	if (w->gone)
		__free_page(w->gone);
	kvfree(w->target);
	kvfree(w->holder);
	pci_dev_put(w->pdev);
	kfree(w);
}

static void destroy(struct kref *ref)
{
	struct window *w = container_of(ref, struct window, ref);

	/* A driver that is unbound waits here until the range is given back, so the domain stays until then. */
	mutex_lock(&windows_lock);
	list_del(&w->in_windows);
	give_range_back(w);
	mutex_unlock(&windows_lock);
	free_window(w);
}

/* ---- making a window ---- */

static struct pci_dev *find_device(const struct cuttlefs_iommu_create *wanted)
{
	if (wanted->pci_segment > INT_MAX || wanted->pci_bus > 0xff || wanted->pci_devfn > 0xff)
		return NULL;
	return pci_get_domain_bus_and_slot(wanted->pci_segment, wanted->pci_bus, wanted->pci_devfn);
}

/* Whether the device's DMA uses entries that can be changed one page at a time. */
static int check_device(struct pci_dev *pdev)
{
	struct iommu_domain *domain;

	device_lock_assert(&pdev->dev);
	/* A driver that manages DMA itself (vfio) has another domain than the DMA API. */
	if (!pdev->driver || pdev->driver->driver_managed_dma)
		return -ENODEV;
	domain = iommu_get_domain_for_dev(&pdev->dev);
	if (!domain || !iommu_is_dma_domain(domain) || !(domain->pgsize_bitmap & PAGE_SIZE))
		return -EOPNOTSUPP;
	/* Such devices have bounce buffers, or caches that must be cleaned. */
	if (pdev->untrusted || !dev_is_dma_coherent(&pdev->dev))
		return -EOPNOTSUPP;
	return 0;
}

/* Lets the DMA API map the gone page once for each page of the window, at consecutive addresses. */
static int reserve_range(struct window *w)
{
	struct scatterlist *sg;
	dma_addr_t next;
	int result;
	u32 i;

	result = sg_alloc_table(&w->reserved, w->pages, GFP_KERNEL_ACCOUNT);
	if (result)
		return result;
	for_each_sgtable_sg(&w->reserved, sg, i)
		sg_set_page(sg, w->gone, PAGE_SIZE, 0);
	result = dma_map_sgtable(&w->pdev->dev, &w->reserved, w->direction, DMA_ATTR_SKIP_CPU_SYNC);
	if (result)
		return result;
	w->iova = sg_dma_address(w->reserved.sgl);
	next = w->iova;
	for_each_sgtable_dma_sg(&w->reserved, sg, i) {
		if (sg_dma_address(sg) != next || sg_dma_len(sg) % PAGE_SIZE)
			break;
		next += sg_dma_len(sg);
	}
	if (!PAGE_ALIGNED(w->iova) || next != w->iova + (dma_addr_t)w->pages * PAGE_SIZE) {
		dma_unmap_sgtable(&w->pdev->dev, &w->reserved, w->direction, DMA_ATTR_SKIP_CPU_SYNC);
		return -EOPNOTSUPP;
	}
	w->domain = iommu_get_domain_for_dev(&w->pdev->dev);
	w->has_device = true;
	return 0;
}

static int fill_gone(struct window *w, u64 magic)
{
	w->gone = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!w->gone)
		return -ENOMEM;
	if (w->direction == DMA_TO_DEVICE && copy_from_user(page_address(w->gone), u64_to_user_ptr(magic), PAGE_SIZE))
		return -EFAULT;
	return 0;
}

static int check_create(const struct cuttlefs_iommu_create *wanted)
{
	u64 arena_bytes = (u64)wanted->arena_pages * PAGE_SIZE;

	if (wanted->abi != CUTTLEFS_IOMMU_ABI)
		return -EPROTONOSUPPORT;
	if (wanted->kind > CUTTLEFS_IOMMU_WRITE || wanted->unused || (wanted->kind == CUTTLEFS_IOMMU_WRITE && wanted->magic))
		return -EINVAL;
	if (!wanted->pages || wanted->pages > CUTTLEFS_IOMMU_MAX_PAGES || !wanted->arena_pages ||
	    wanted->arena_pages > CUTTLEFS_IOMMU_MAX_ARENA_PAGES)
		return -EINVAL;
	if (!PAGE_ALIGNED(wanted->arena) || wanted->arena > TASK_SIZE || arena_bytes > TASK_SIZE - wanted->arena)
		return -EINVAL;
	return 0;
}

static struct window *make_window(const struct cuttlefs_iommu_create *wanted)
{
	struct window *w;
	int result;

	result = check_create(wanted);
	if (result)
		return ERR_PTR(result);
	w = kzalloc(sizeof(*w), GFP_KERNEL_ACCOUNT);
	if (!w)
		return ERR_PTR(-ENOMEM);
	kref_init(&w->ref);
	mutex_init(&w->lock);
	INIT_LIST_HEAD(&w->in_windows);
	w->is_open = true;
	w->direction = wanted->kind == CUTTLEFS_IOMMU_READ ? DMA_TO_DEVICE : DMA_BIDIRECTIONAL;
	w->prot = IOMMU_CACHE | IOMMU_READ | (wanted->kind == CUTTLEFS_IOMMU_WRITE ? IOMMU_WRITE : 0);
	w->pages = wanted->pages;
	w->arena_start = wanted->arena;
	w->arena_pages = wanted->arena_pages;
	result = -ENODEV;
	w->pdev = find_device(wanted);
	if (!w->pdev)
		goto fail;
	result = -ENOMEM;
	w->target = kvmalloc_array(w->pages, sizeof(*w->target), GFP_KERNEL_ACCOUNT);
	w->holder = kvmalloc_array(w->arena_pages, sizeof(*w->holder), GFP_KERNEL_ACCOUNT);
	if (!w->target || !w->holder)
		goto fail;
	memset(w->target, 0xff, w->pages * sizeof(*w->target));
	memset(w->holder, 0xff, (size_t)w->arena_pages * sizeof(*w->holder));
	result = fill_gone(w, wanted->magic);
	if (result)
		goto fail;

	result = mmu_interval_notifier_insert(&w->arena, current->mm, w->arena_start, (unsigned long)w->arena_pages * PAGE_SIZE,
					      &arena_ops);
	if (result)
		goto fail;
	device_lock(&w->pdev->dev);
	result = check_device(w->pdev);
	if (!result)
		result = reserve_range(w);
	if (!result) {
		mutex_lock(&windows_lock);
		list_add(&w->in_windows, &windows);
		mutex_unlock(&windows_lock);
	}
	device_unlock(&w->pdev->dev);
	if (!result)
		return w;
	mmu_interval_notifier_remove(&w->arena);
fail:
	free_window(w);
	return ERR_PTR(result);
}

static int ioctl_create(struct handle *handle, void __user *argument)
{
	struct cuttlefs_iommu_create wanted;
	struct window *w;
	int result = 0;

	if (copy_from_user(&wanted, argument, sizeof(wanted)))
		return -EFAULT;
	mutex_lock(&handle->making);
	if (handle->window) {
		result = -EBUSY;
		goto out;
	}
	w = make_window(&wanted);
	if (IS_ERR(w)) {
		result = PTR_ERR(w);
		goto out;
	}
	wanted.iova = w->iova;
	/* If copying the answer fails, the caller finds the address in the status. */
	smp_store_release(&handle->window, w);
	if (copy_to_user(argument, &wanted, sizeof(wanted)))
		result = -EFAULT;
out:
	mutex_unlock(&handle->making);
	return result;
}

/* ---- pointing pages ---- */

/* Looks up the page of one entry. The caller must put the reference in `found`. */
static int look_up(struct window *w, u32 target, struct page **found)
{
	unsigned int flags = w->direction == DMA_BIDIRECTIONAL ? FOLL_WRITE : 0;
	int count;

	*found = NULL;
	if (target == GONE)
		return 0;
	count = get_user_pages_fast(w->arena_start + (unsigned long)target * PAGE_SIZE, 1, flags, found);
	if (count == 1)
		return 0;
	*found = NULL;
	return count < 0 ? count : -EFAULT;
}

static int check_entry(const struct window *w, const struct cuttlefs_iommu_entry *entry)
{
	if (entry->page >= w->pages || (entry->target != GONE && entry->target >= w->arena_pages))
		return -EINVAL;
	return 0;
}

/* How many of these entries can change together: up to the first that repeats a page of the window or of the arena. */
static u32 without_repeats(const struct cuttlefs_iommu_entry *entries, u32 count)
{
	u32 i, j;

	for (i = 1; i < count; i++)
		for (j = 0; j < i; j++)
			if (entries[i].page == entries[j].page ||
			    (entries[i].target == entries[j].target && entries[i].target != GONE))
				return i;
	return count;
}

/* Points up to BATCH pages. `done` is how many entries took effect, from the first on. */
static int point_batch(struct window *w, const struct cuttlefs_iommu_entry *entries, u32 count, u32 *done)
{
	struct page *found[BATCH];
	struct batch batch;
	unsigned long seq;
	int refused, result;
	u32 looked_up, i;

	*done = 0;
	count = without_repeats(entries, count);
again:
	seq = mmu_interval_read_begin(&w->arena);
	refused = 0;
	for (looked_up = 0; looked_up < count; looked_up++) {
		refused = check_entry(w, &entries[looked_up]);
		if (!refused)
			refused = look_up(w, entries[looked_up].target, &found[looked_up]);
		if (refused)
			break;
	}
	mutex_lock(&w->lock);
	if (mmu_interval_read_retry(&w->arena, seq)) {
		mutex_unlock(&w->lock);
		for (i = 0; i < looked_up; i++)
			if (found[i])
				put_page(found[i]);
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
		goto again;
	}
	batch.count = 0;
	result = w->has_device && w->is_open ? 0 : -ENODEV;
	for (i = 0; i < looked_up && !result; i++) {
		u32 page = entries[i].page, target = entries[i].target;

		/*
		 * A page of the arena is shown at one page of the window only. If an earlier entry of this batch releases it, this entry becomes the
		 * first of the next batch.
		 */
		if (target != GONE && w->holder[target] != NOBODY && w->holder[target] != page) {
			if (!i)
				result = -EEXIST;
			break;
		}
		batch.page[i] = page;
		batch.target[i] = target;
		batch.at[i] = target == GONE ? gone_at(w) : page_to_phys(found[i]);
		batch.count++;
	}
	*done = batch.count;
	w->pointed += batch.count;
	if (change(w, &batch) && !result)
		result = -EIO;
	mutex_unlock(&w->lock);
	/* From here on only the notifier protects the mapped pages. */
	for (i = 0; i < looked_up; i++)
		if (found[i])
			put_page(found[i]);
	return result || batch.count < looked_up ? result : refused;
}

static int ioctl_point(struct window *w, void __user *argument)
{
	struct cuttlefs_iommu_point wanted;
	struct cuttlefs_iommu_entry entries[BATCH];
	int result = 0;

	if (copy_from_user(&wanted, argument, sizeof(wanted)))
		return -EFAULT;
	if (wanted.count > CUTTLEFS_IOMMU_MAX_ENTRIES)
		return -EINVAL;
	/* The arena is memory of one process. A child that has the file has other memory at its addresses. */
	if (current->mm != w->arena.mm)
		return -EXDEV;
	for (wanted.done = 0; wanted.done < wanted.count && !result;) {
		u32 count = min_t(u32, wanted.count - wanted.done, BATCH), done = 0;
		u64 at = wanted.entries + (u64)wanted.done * sizeof(entries[0]);

		if (copy_from_user(entries, u64_to_user_ptr(at), count * sizeof(entries[0])))
			result = -EFAULT;
		else if (fatal_signal_pending(current))
			result = -EINTR;
		else
			result = point_batch(w, entries, count, &done);
		wanted.done += done;
		cond_resched();
	}
	if (copy_to_user(argument, &wanted, sizeof(wanted)))
		return -EFAULT;
	return result;
}

static int ioctl_status(struct window *w, void __user *argument)
{
	struct cuttlefs_iommu_status status = {};

	mutex_lock(&w->lock);
	status.iova = w->iova;
	status.pages = w->pages;
	status.arena_pages = w->arena_pages;
	status.shown = w->shown;
	status.holes = w->holes;
	status.has_device = w->has_device;
	status.pointed = w->pointed;
	status.taken = w->taken;
	status.invalidations = w->invalidations;
	mutex_unlock(&w->lock);
	return copy_to_user(argument, &status, sizeof(status)) ? -EFAULT : 0;
}

/* ---- giving the range to the device's driver ---- */

static int dmabuf_attach(struct dma_buf *dmabuf, struct dma_buf_attachment *attachment)
{
	struct window *w = dmabuf->priv;

	/* The addresses are valid for one device only. */
	return attachment->dev == &w->pdev->dev && READ_ONCE(w->has_device) ? 0 : -EXDEV;
}

static struct sg_table *dmabuf_map(struct dma_buf_attachment *attachment, enum dma_data_direction direction)
{
	struct window *w = attachment->dmabuf->priv;
	/* Drivers have 32 bits for lengths. */
	const u64 step = SZ_1G;
	u64 bytes = (u64)w->pages * PAGE_SIZE, at = 0;
	struct scatterlist *sg;
	struct sg_table *table;
	u32 i;

	if (w->direction == DMA_TO_DEVICE && direction != DMA_TO_DEVICE)
		return ERR_PTR(-EACCES);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	if (sg_alloc_table(table, DIV_ROUND_UP_ULL(bytes, step), GFP_KERNEL)) {
		kfree(table);
		return ERR_PTR(-ENOMEM);
	}
	for_each_sgtable_dma_sg(table, sg, i) {
		/* Addresses only: no page of the CPU's stays behind an address. */
		sg_dma_address(sg) = w->iova + at;
		sg_dma_len(sg) = min(step, bytes - at);
		at += step;
	}
	return table;
}

static void dmabuf_unmap(struct dma_buf_attachment *attachment, struct sg_table *table, enum dma_data_direction direction)
{
	sg_free_table(table);
	kfree(table);
}

static void dmabuf_release(struct dma_buf *dmabuf)
{
	struct window *w = dmabuf->priv;

	kref_put(&w->ref, destroy);
}

static const struct dma_buf_ops dmabuf_ops = {
	.attach = dmabuf_attach,
	.map_dma_buf = dmabuf_map,
	.unmap_dma_buf = dmabuf_unmap,
	.release = dmabuf_release,
};

static int ioctl_export(struct window *w)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct dma_buf *dmabuf;
	int fd;

	info.ops = &dmabuf_ops;
	info.size = (size_t)w->pages * PAGE_SIZE;
	info.flags = O_RDWR | O_CLOEXEC;
	info.priv = w;
	kref_get(&w->ref);
	dmabuf = dma_buf_export(&info);
	if (IS_ERR(dmabuf)) {
		kref_put(&w->ref, destroy);
		return PTR_ERR(dmabuf);
	}
	fd = dma_buf_fd(dmabuf, O_CLOEXEC);
	if (fd < 0)
		dma_buf_put(dmabuf);
	return fd;
}

/* ---- the character device ---- */

static long window_ioctl(struct file *file, unsigned int command, unsigned long argument)
{
	struct handle *handle = file->private_data;
	struct window *w;

	if (command == CUTTLEFS_IOMMU_CREATE)
		return ioctl_create(handle, (void __user *)argument);
	/* The window stays until the file is closed. */
	w = smp_load_acquire(&handle->window);
	if (!w)
		return _IOC_TYPE(command) == 'c' ? -ENXIO : -ENOTTY;
	switch (command) {
	case CUTTLEFS_IOMMU_POINT:
		return ioctl_point(w, (void __user *)argument);
	case CUTTLEFS_IOMMU_EXPORT:
		return ioctl_export(w);
	case CUTTLEFS_IOMMU_STATUS:
		return ioctl_status(w, (void __user *)argument);
	default:
		return -ENOTTY;
	}
}

static int window_open(struct inode *inode, struct file *file)
{
	struct handle *handle = kzalloc(sizeof(*handle), GFP_KERNEL_ACCOUNT);

	if (!handle)
		return -ENOMEM;
	mutex_init(&handle->making);
	file->private_data = handle;
	return 0;
}

static int window_release(struct inode *inode, struct file *file)
{
	struct handle *handle = file->private_data;
	struct window *w = handle->window;

	if (w) {
		mutex_lock(&w->lock);
		w->is_open = false;
		if (w->has_device)
			take(w, 0, w->arena_pages, true);
		mutex_unlock(&w->lock);
		/* No page of the arena is mapped any more; a dma-buf may keep the addresses. */
		mmu_interval_notifier_remove(&w->arena);
		kref_put(&w->ref, destroy);
	}
	mutex_destroy(&handle->making);
	kfree(handle);
	return 0;
}

static const struct file_operations window_fops = {
	.owner = THIS_MODULE,
	.open = window_open,
	.release = window_release,
	.unlocked_ioctl = window_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "cuttlefs_iommu",
	.mode = 0600,
	.fops = &window_fops,
};

/* A device that lost its driver does no DMA, and from now on its domain may change. The caller holds device_lock(). */
static int bus_changed(struct notifier_block *block, unsigned long action, void *data)
{
	struct window *w;

	if (action != BUS_NOTIFY_UNBOUND_DRIVER)
		return NOTIFY_DONE;
	mutex_lock(&windows_lock);
	list_for_each_entry(w, &windows, in_windows)
		if (&w->pdev->dev == data)
			give_range_back(w);
	mutex_unlock(&windows_lock);
	return NOTIFY_OK;
}

/*
 * Called before the notifier of the DMA API's debugging (CONFIG_DMA_API_DEBUG), which has the priority 0 and at the same event complains of what a device
 * without a driver still has.
 */
static struct notifier_block bus_notifier = {
	.notifier_call = bus_changed,
	.priority = 1,
};

static int __init cuttlefs_iommu_init(void)
{
	int result;

	/* The layouts must be the same with every compiler. */
	BUILD_BUG_ON(sizeof(struct cuttlefs_iommu_create) != 56);
	BUILD_BUG_ON(sizeof(struct cuttlefs_iommu_status) != 56);
	BUILD_BUG_ON(PAGE_SIZE != CUTTLEFS_IOMMU_PAGE_BYTES);
	result = bus_register_notifier(&pci_bus_type, &bus_notifier);
	if (result)
		return result;
	result = misc_register(&device);
	if (result)
		bus_unregister_notifier(&pci_bus_type, &bus_notifier);
	return result;
}

static void __exit cuttlefs_iommu_exit(void)
{
	misc_deregister(&device);
	bus_unregister_notifier(&pci_bus_type, &bus_notifier);
}

module_init(cuttlefs_iommu_init);
module_exit(cuttlefs_iommu_exit);
MODULE_DESCRIPTION("windows of fixed IOVAs whose pages come and go, for cuttlefs");
MODULE_AUTHOR("the cuttlefs authors");
MODULE_LICENSE("GPL");
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
