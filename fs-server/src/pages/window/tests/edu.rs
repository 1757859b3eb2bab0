//! The server's own pages behind an IOMMU: QEMU's device `edu` reads the window while pages come and go. These tests run in a virtual machine, as
//! root, with the modules of kmod-iommu (scripts/vm/kmod-test.sh -p).

use super::super::iommu::{IommuWindow, PciAddress};
use super::*;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};

/// Bytes of one transfer of the device (kmod-iommu/test/edu_dma.h).
const LEN: usize = 4088;

/// `struct edu_dma_transfer` of that header.
#[repr(C)]
struct Transfer {
    offset: u64,
    buffer: u64,
    len: u32,
    unused: u32,
}

/// The device, with a window registered.
struct Edu(OwnedFd);

impl Edu {
    fn call(&self, command: u64, argument: *mut libc::c_void) {
        // SAFETY: the callers give a command of edu_dma.h and the structure that belongs to it, which lives until this returns.
        let result = unsafe { libc::ioctl(self.0.as_raw_fd(), command as libc::Ioctl, argument) };
        assert!(result >= 0, "edu: {}", io::Error::last_os_error());
    }

    fn register(dmabuf: &OwnedFd) -> Self {
        let edu = rustix::fs::open("/dev/edu_dma", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let edu = Self(edu.expect("/dev/edu_dma"));
        let mut fd = dmabuf.as_raw_fd();
        edu.call(0x4004_6590, (&raw mut fd).cast());
        edu
    }

    /// The words of a page as the device reads them; all 0 if its transfer faulted.
    fn words(&self, page: u64) -> Vec<u64> {
        let mut bytes = vec![0; LEN];
        let mut transfer = Transfer {
            offset: page * PAGE_SIZE as u64,
            buffer: bytes.as_mut_ptr() as u64,
            len: LEN as u32,
            unused: 0,
        };
        self.call(0xc018_6591, (&raw mut transfer).cast());
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight"))).collect()
    }

    fn word(&self, page: u64) -> u64 {
        let words = self.words(page);
        assert!(words.iter().all(|word| *word == words[0]), "page {page} is mixed");
        words[0]
    }
}

fn device() -> PciAddress {
    let driver = std::fs::read_dir("/sys/bus/pci/drivers/edu_dma").expect("the driver edu_dma");
    let mut names = driver.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find_map(|name| name.parse().ok()).expect("a device edu")
}

fn window(frames: &Arc<Frames>) -> (IommuWindow, Edu) {
    let window = IommuWindow::new(device(), POOL, frames).expect("a window");
    let edu = Edu::register(&window.export().expect("a dma-buf")[0]);
    (window, edu)
}

#[test]
#[ignore = "wants a device behind an IOMMU: scripts/vm/kmod-test.sh"]
fn a_device_reads_what_the_residency_table_says() {
    let frames = frames(7);
    let (window, edu) = window(&frames);
    let residency = residency(&frames, window);
    assert_eq!((edu.word(0), edu.word(POOL - 1)), (MAGIC, MAGIC));
    residency.publish(PoolPage(5), filled(&frames, 55), false);
    residency.publish(PoolPage(500), filled(&frames, 77), false);
    residency.settle_window();
    assert_eq!([4, 5, 6, 500].map(|page| edu.word(page)), [MAGIC, 55, MAGIC, 77]);
    residency.vacate(PoolPage(5));
    residency.settle_window();
    assert_eq!((edu.word(5), edu.word(500), frames.free()), (MAGIC, 77, 3));
    residency.publish(PoolPage(5), filled(&frames, 56), false);
    residency.vacate(PoolPage(500));
    residency.publish(PoolPage(6), filled(&frames, 66), false);
    residency.settle_window();
    assert_eq!([5, 6, 500].map(|page| edu.word(page)), [56, 66, MAGIC]);
}

#[test]
#[ignore = "wants a device behind an IOMMU: scripts/vm/kmod-test.sh"]
fn a_device_reads_pages_that_come_and_go_or_magic_and_nothing_else() {
    const PAGES: u64 = 40;
    const READS: u64 = 60;
    let frames = frames(3 + 20);
    let (window, edu) = window(&frames);
    let residency = residency(&frames, window);
    let is_over = AtomicBool::new(false);
    let (mut shown, mut gone, mut faulted) = (0, 0, 0);
    std::thread::scope(|scope| {
        let turns = scope.spawn(|| come_and_go(&frames, &residency, PAGES, &is_over));
        let ends = Ends(&is_over);
        for read in 0..READS {
            let page = read % PAGES;
            let words = edu.words(page);
            let bad = words.iter().find(|word| ![MAGIC, 0].contains(*word) && !is_of(**word, page));
            assert_eq!(bad, None, "the device reads something else at page {page}");
            shown += u32::from(words.iter().any(|word| is_of(*word, page)));
            gone += u32::from(words.contains(&MAGIC));
            faulted += u32::from(words.contains(&0));
        }
        drop(ends);
        let turns = turns.join().expect("no panic");
        println!(
            "{READS} reads of the device while pages came or went {turns} times: the page in {shown}, magic in {gone}, a fault in {faulted}"
        );
    });
    assert!(shown > 0 && gone > 0);
}

/// The device loses its driver, as when the module of a NIC is unloaded. The window is gone, and the server's pages come and go without it.
#[test]
#[ignore = "wants a device behind an IOMMU: scripts/vm/kmod-test.sh"]
fn a_server_outlives_its_window() {
    let frames = frames(7);
    let (window, edu) = window(&frames);
    let residency = residency(&frames, window);
    residency.publish(PoolPage(5), filled(&frames, 55), false);
    residency.settle_window();
    assert_eq!(edu.word(5), 55);
    drop(edu);
    let (driver, device) = ("/sys/bus/pci/drivers/edu_dma", device().to_string());
    std::fs::write(format!("{driver}/unbind"), &device).expect("unbind");
    residency.vacate(PoolPage(5));
    residency.settle_window();
    assert_eq!(frames.free(), 4, "the frame is free, window or not");
    residency.publish(PoolPage(5), filled(&frames, 56), false);
    residency.vacate(PoolPage(5));
    assert_eq!(frames.free(), 4);
    std::fs::write(format!("{driver}/bind"), &device).expect("bind");
}
