/* SPDX-License-Identifier: GPL-2.0 */
/* Shared by the programs that make windows of QEMU's edu device. */
#ifndef WINDOW_H
#define WINDOW_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "../cuttlefs_iommu.h"

#define PAGE 4096

/* The edu device. */
static struct cuttlefs_iommu_create pci;
static char pci_name[32];
static unsigned char magic[PAGE];

static void need(int is_good, const char *what)
{
	if (is_good)
		return;
	printf("cannot go on: %s: %s\n", what, strerror(errno));
	exit(1);
}

static void find_edu(void)
{
	struct dirent *entry;
	DIR *driver = opendir("/sys/bus/pci/drivers/edu_dma");
	unsigned int segment, bus, slot, function;

	need(driver != NULL, "the driver edu_dma");
	while ((entry = readdir(driver)))
		if (sscanf(entry->d_name, "%x:%x:%x.%x", &segment, &bus, &slot, &function) == 4)
			snprintf(pci_name, sizeof(pci_name), "%.31s", entry->d_name);
	closedir(driver);
	need(sscanf(pci_name, "%x:%x:%x.%x", &segment, &bus, &slot, &function) == 4, "a device edu");
	pci.pci_segment = segment;
	pci.pci_bus = bus;
	pci.pci_devfn = slot * 8 + function;
}

static struct cuttlefs_iommu_create wanted(uint32_t kind, uint32_t pages, void *at, uint32_t arena_pages)
{
	struct cuttlefs_iommu_create create = pci;

	create.abi = CUTTLEFS_IOMMU_ABI;
	create.kind = kind;
	create.pages = pages;
	create.arena = (uintptr_t)at;
	create.arena_pages = arena_pages;
	create.magic = kind == CUTTLEFS_IOMMU_READ ? (uintptr_t)magic : 0;
	return create;
}

static int open_window(void)
{
	int fd = open("/dev/cuttlefs_iommu", O_RDWR | O_CLOEXEC);

	need(fd >= 0, "/dev/cuttlefs_iommu");
	return fd;
}

#endif
