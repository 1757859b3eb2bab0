//! The object store every system serves: objects of one size in persistent memory, written back before the answer.
//!
//! A request is 16 bytes (operation, key, count, bytes of an object) and, of writes, for each object its key and its
//! bytes. An object begins with its key, which readers check.

use anyhow::{Context as _, ensure};
use cuttlefs_common::persist::{LogDevice, LogDeviceKind};
use cuttlefs_common::rpc::durable::{Executed, Request, Service};
use std::cell::Cell;
use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

/// Bytes before the objects of a request.
pub(super) const REQUEST_HEADER: usize = 16;
/// Objects one scan returns.
pub(super) const SCAN_MAX: u32 = 8;
const WRITE: u32 = 1;
const READ: u32 = 2;

/// The objects.
pub(super) struct ObjectStore {
    device: LogDevice,
    objects: u32,
    object_len: usize,
    /// How long the work of a request takes beyond reading or writing.
    processing: Duration,
}

impl ObjectStore {
    pub(super) fn new(
        path: &Path,
        objects: u32,
        object_len: usize,
        processing: Duration,
    ) -> anyhow::Result<Self> {
        ensure!(object_len >= 8, "an object has at least 8 bytes");
        let kind = Some(LogDeviceKind::PmemEmulated);
        let device = LogDevice::open(path, objects as usize * object_len, kind).context("no object store")?;
        for key in 0..objects {
            device.memory().write(key as usize * object_len, &key.to_le_bytes());
        }
        Ok(Self { device, objects, object_len, processing })
    }

    fn word(body: &[u8], index: usize) -> Option<u32> {
        body.get(index * 4..index * 4 + 4).and_then(|word| word.try_into().ok()).map(u32::from_le_bytes)
    }

    /// Does a request; the status is 0 if it could be done.
    pub(super) fn serve(&self, body: &[u8], answer: &mut Vec<u8>) -> u32 {
        self.process();
        let header = [0, 1, 2, 3].map(|index| Self::word(body, index));
        let [Some(operation), Some(key), Some(count), Some(len)] = header else { return 1 };
        if len as usize != self.object_len || key >= self.objects || count == 0 {
            return 1;
        }
        match operation {
            WRITE => self.write(&body[REQUEST_HEADER..], count as usize),
            READ if count <= SCAN_MAX => {
                for index in 0..count {
                    let key = (key + index) % self.objects;
                    let start = answer.len();
                    answer.resize(start + self.object_len, 0);
                    self.device.memory().read(key as usize * self.object_len, &mut answer[start..]);
                }
                0
            }
            _ => 1,
        }
    }

    fn write(&self, items: &[u8], count: usize) -> u32 {
        let item_len = 4 + self.object_len;
        if items.len() != count * item_len {
            return 1;
        }
        let memory = self.device.memory();
        for item in items.chunks_exact(item_len) {
            let Some(key) = Self::word(item, 0).filter(|key| *key < self.objects) else { return 1 };
            let at = key as usize * self.object_len;
            memory.write(at, &item[4..]);
            memory.write_back(at, self.object_len);
        }
        0
    }

    /// What a real service would compute.
    fn process(&self) {
        thread_local! {
            static EXACT: Cell<bool> = const { Cell::new(false) };
        }
        if self.processing.is_zero() {
            return;
        }
        if !EXACT.replace(true) {
            // The usual slack of 50 microseconds would be half of what is to be waited.
            let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        }
        std::thread::sleep(self.processing);
    }
}

impl Service for ObjectStore {
    fn lane(&self, body: &[u8]) -> u64 {
        Self::word(body, 1).unwrap_or(0).into()
    }

    fn execute(&self, request: &Request<'_>, answer: &mut Vec<u8>) -> Executed {
        Executed::Done(self.serve(request.body, answer))
    }
}

/// Builds requests of one object size.
#[derive(Clone, Debug)]
pub(super) struct Requests {
    pub(super) object_len: usize,
    object: Vec<u8>,
    pub(super) bytes: Vec<u8>,
}

impl Requests {
    pub(super) fn new(object_len: usize) -> Self {
        Self { object_len, object: vec![0x5a; object_len], bytes: Vec::new() }
    }

    fn header(&mut self, operation: u32, key: u32, count: u32) {
        self.bytes.clear();
        for word in [operation, key, count, self.object_len as u32] {
            self.bytes.extend_from_slice(&word.to_le_bytes());
        }
    }

    /// Writes of these keys.
    pub(super) fn write(&mut self, keys: &[u32]) {
        self.header(WRITE, keys.first().copied().unwrap_or(0), keys.len() as u32);
        for key in keys {
            self.bytes.extend_from_slice(&key.to_le_bytes());
            self.object[..4].copy_from_slice(&key.to_le_bytes());
            self.bytes.extend_from_slice(&self.object);
        }
    }

    /// A read of `count` objects from a key on.
    pub(super) fn read(&mut self, key: u32, count: u32) {
        self.header(READ, key, count);
    }

    /// Bytes of a request that writes so many.
    pub(super) fn write_len(object_len: usize, count: usize) -> usize {
        REQUEST_HEADER + count * (4 + object_len)
    }

    /// Checks what a read brought.
    pub(super) fn check(&self, key: u32, count: u32, answer: &[u8]) -> anyhow::Result<()> {
        ensure!(answer.len() == count as usize * self.object_len, "an answer of {} bytes", answer.len());
        ensure!(answer[..4] == key.to_le_bytes(), "object {key} is not what was written");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_come_back_and_nonsense_is_refused() {
        let dir = tempfile::tempdir().expect("dir");
        let store = ObjectStore::new(&dir.path().join("store"), 10, 32, Duration::ZERO).expect("store");
        let mut requests = Requests::new(32);
        requests.write(&[3, 7]);
        assert_eq!(requests.bytes.len(), Requests::write_len(32, 2));
        let mut answer = Vec::new();
        assert_eq!(store.serve(&requests.bytes, &mut answer), 0);
        requests.read(9, 2);
        assert_eq!(store.serve(&requests.bytes, &mut answer), 0);
        requests.check(9, 2, &answer).expect("good");
        assert!(requests.check(3, 2, &answer).is_err());
        for bytes in [&b""[..], &[1; 40], &[0; 16]] {
            assert_eq!(store.serve(bytes, &mut Vec::new()), 1);
        }
        let mut short = Requests::new(32);
        short.write(&[11]);
        assert_eq!(store.serve(&short.bytes, &mut Vec::new()), 1);
    }
}
