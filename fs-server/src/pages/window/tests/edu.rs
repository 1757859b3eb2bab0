//! The server's own pages behind an IOMMU: QEMU's device `edu` reads the window while pages come and go. These tests run in a virtual machine, as
//! root, with the modules of kmod-iommu (scripts/vm/kmod-test.sh).

use super::super::iommu::IommuWindow;
use super::super::pci_address::PciAddress;
use super::*;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};

/// Bytes of one transfer of the device (kmod-iommu/test/edu_dma.h).
const LEN: usize = 4088;
/// Words of 32 aligned bytes, which are of one page: who reads a page tells by them whether it is magic.
const UNIT: usize = 4;
/// How often a transfer is tried. With wide holes every other one fails at most; a half to the power of 48 is 4e-15.
const TRIES: u32 = 48;

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

    /// The words of a page as the device reads them; nothing (`is_nothing`) where its transfer faulted.
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

    /// What an initiator does: it repeats a transfer that failed. (An RNIC's READ completes with an error and breaks its queue pair; the requester
    /// connects again, and asks again.) `None`: all tries failed. What a failed one brought is looked at, too.
    fn words_in_the_end(&self, page: u64) -> Option<Ended> {
        (1..=TRIES).find_map(|tries| {
            let words = self.words(page);
            for unit in words.chunks(UNIT) {
                let of_pages = || unit.iter().filter(|word| !is_nothing(**word));
                let bad = of_pages().find(|word| **word != MAGIC && !is_of(**word, page));
                assert_eq!(bad, None, "the device reads something else at page {page}");
                let is_one = of_pages().all(|word| Some(word) == of_pages().next());
                assert!(is_one, "32 bytes of page {page} are of more than one: {unit:x?}");
            }
            (!words.iter().any(|word| is_nothing(*word))).then_some(Ended { words, tries })
        })
    }
}

/// Whether a transfer failed at this word, or at a half of it: QEMU asks the IOMMU again for each four bytes that it refuses, so a transfer may fail up
/// to the middle of a page, where the entry is there again. No half of a page's words is 0.
fn is_nothing(word: u64) -> bool {
    word >> 32 == 0 || word & 0xffff_ffff == 0
}

/// A transfer that ended well.
struct Ended {
    words: Vec<u64>,
    tries: u32,
}

/// Makes all holes so long, until it is dropped.
struct Holes;

impl Holes {
    fn of(us: u32) -> Self {
        std::fs::write("/sys/module/cuttlefs_iommu/parameters/hole_us", us.to_string()).expect("hole_us");
        Self
    }
}

impl Drop for Holes {
    fn drop(&mut self) {
        let _ = std::fs::write("/sys/module/cuttlefs_iommu/parameters/hole_us", "0");
    }
}

fn device() -> PciAddress {
    let driver = std::fs::read_dir("/sys/bus/pci/drivers/edu_dma").expect("the driver edu_dma");
    let mut names = driver.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.find_map(|name| name.parse().ok()).expect("a device edu")
}

fn window(frames: &Arc<Frames>) -> (Arc<IommuWindow>, Edu) {
    let window = IommuWindow::new(&[("edu".to_owned(), device())], POOL, frames);
    let window = Arc::new(window.expect("a window"));
    let edu = Edu::register(&window.export("edu").expect("a dma-buf"));
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

/// What the device found while pages came and went.
#[derive(Debug, Default)]
struct Found {
    transfers: u32,
    shown: u32,
    gone: u32,
    met_a_hole: u32,
    failed_tries: u32,
    most_tries: u32,
}

/// The device reads pages that come and go until `enough`, which is told what it found and how often pages changed. A transfer that does not end
/// well, or brings what it must not, is a failure.
fn read_while_pages_come_and_go(hole_us: u32, enough: impl Fn(&Found, u64) -> bool) {
    const PAGES: u64 = 40;
    /// Ends a test that does not see what it must.
    const MOST: u32 = 600;
    let frames = frames(3 + 20);
    let (window, edu) = window(&frames);
    let residency = residency(&frames, window);
    let _holes = Holes::of(hole_us);
    let is_over = AtomicBool::new(false);
    let turns = AtomicU64::new(0);
    let mut found = Found::default();
    std::thread::scope(|scope| {
        scope.spawn(|| come_and_go(&frames, &residency, PAGES, &is_over, &turns));
        let _ends = Ends(&is_over);
        while !enough(&found, turns.load(Ordering::Relaxed)) {
            assert!(found.transfers < MOST, "not all was seen that must be: {found:?}");
            let page = u64::from(found.transfers) % PAGES;
            let ended = edu.words_in_the_end(page);
            let Ended { words, tries } = ended.expect("a transfer ends well after some tries");
            found.transfers += 1;
            found.shown += u32::from(words.iter().any(|word| is_of(*word, page)));
            found.gone += u32::from(words.contains(&MAGIC));
            found.met_a_hole += u32::from(tries > 1);
            found.failed_tries += tries - 1;
            found.most_tries = found.most_tries.max(tries);
        }
    });
    let Found { transfers, shown, gone, met_a_hole, failed_tries, most_tries } = found;
    println!(
        "holes {}: {transfers} transfers while pages came or went {} times; the page in {shown}, magic in {gone}; {met_a_hole} met a hole, \
         {failed_tries} tries failed, at most {most_tries} tries a transfer",
        if hole_us == 0 { "as they are".to_owned() } else { format!("of {hole_us} us") },
        turns.into_inner(),
    );
}

#[test]
#[ignore = "wants a device behind an IOMMU: scripts/vm/kmod-test.sh"]
fn a_device_reads_pages_that_come_and_go_or_magic_and_nothing_else() {
    read_while_pages_come_and_go(0, |found, turns| {
        found.transfers >= 60 && turns >= 10_000 && found.shown > 0 && found.gone > 0
    });
}

#[test]
#[ignore = "wants a device behind an IOMMU: scripts/vm/kmod-test.sh"]
fn a_transfer_that_meets_a_hole_is_repeated_and_ends_well() {
    read_while_pages_come_and_go(2000, |found, _| {
        found.transfers >= 30 && found.failed_tries > 0 && found.shown > 0 && found.gone > 0
    });
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
