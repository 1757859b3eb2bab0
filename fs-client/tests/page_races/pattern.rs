//! Data that equals the server's magic pattern: a read that takes it for the pattern costs a request, and returns the right bytes.

use super::actors::{World, had_room};
use super::running::{CALLER, READ, READ_WRITE, figure, read};
use super::words::{WORDS, bytes_of};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Handle, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::region::MagicPattern;

const PAGES: u64 = 20;

impl World<'_> {
    /// Writes the pattern and words, in whole pages and parts, and reads them back through every client. No other thread writes this file, so every
    /// byte is known. The client `plain` pulls no bitmaps: only the bytes of a read tell it that a page is not in memory. (Where all clients read the
    /// tables, the tables tell them, and there is no `plain`.)
    pub fn pattern_writer(&self, magic: &MagicPattern, plain: Option<&RemoteVolume>) {
        let draw = self.random(70);
        let made = self.clients[0].create(&CALLER, InodeNo::ROOT, b"pattern", 0o644, true, READ_WRITE);
        let (attr, opened) = made.expect("create");
        let size = SetAttr { size: Some(PAGES * PAGE_SIZE_U64), ..SetAttr::default() };
        self.clients[0].set_attr(&CALLER, attr.ino, size).expect("truncate");
        let handles = self.clients.map(|client| client.open(&CALLER, attr.ino, READ).expect("open").handle);
        let mut model = vec![0; (PAGES * PAGE_SIZE_U64) as usize];
        let mut steps = 0;
        while self.goes_on(steps, 2) {
            steps += 1;
            let page = draw(PAGES);
            let offset_in_page = if draw(2) == 0 { 0 } else { draw(PAGE_SIZE_U64) as usize };
            let len = if draw(2) == 0 { PAGE_SIZE } else { 1 + draw(3 * PAGE_SIZE_U64) as usize };
            let start = page as usize * PAGE_SIZE + offset_in_page;
            let end = (start + len).min(model.len());
            let mut bytes = bytes_of(999, page, steps, 4 * WORDS);
            bytes.truncate(end - start);
            if draw(3) > 0 {
                magic.fill(offset_in_page, &mut bytes);
            }
            if !had_room(self.clients[0].write(&CALLER, opened.handle, start as u64, &bytes)) {
                // The front part may have been written. A read shows which.
                let found = read(self.clients[0], opened.handle, 0, model.len() as u32).expect("read");
                let is_known =
                    |at: usize| found[at] == model[at] || found.get(at) == bytes.get(at.wrapping_sub(start));
                assert!((0..model.len()).all(is_known), "no room, and yet something else");
                model = found;
                continue;
            }
            model[start..end].copy_from_slice(&bytes);
            for (client, handle) in self.clients.iter().zip(handles) {
                self.check(client, handle, &model, start as u64, (end - start) as u32);
                let (first, count) = (draw(PAGES), 1 + draw(4) as u32);
                self.check(client, handle, &model, first * PAGE_SIZE_U64, count * PAGE_SIZE as u32);
            }
        }
        if let Some(plain) = plain {
            self.look_at_the_pattern(magic, plain, attr.ino, opened.handle);
        }
        for (client, handle) in self.clients.iter().zip(handles) {
            client.release(handle);
        }
        self.clients[0].release(opened.handle);
    }

    /// Each read of a page that equals the pattern must cost a request, whether the page is in a frame or not.
    fn look_at_the_pattern(&self, magic: &MagicPattern, plain: &RemoteVolume, ino: InodeNo, writes: Handle) {
        let looking = plain.open(&CALLER, ino, READ).expect("open").handle;
        let mut page = vec![0; PAGE_SIZE];
        magic.fill(0, &mut page);
        if had_room(self.clients[0].write(&CALLER, writes, 0, &page)) {
            let before = figure(plain, "magic_hits");
            for _ in 0..10 {
                assert_eq!(read(plain, looking, 0, PAGE_SIZE as u32).expect("read"), page);
            }
            assert!(figure(plain, "magic_hits") >= before + 10, "the pattern was believed to be data");
        }
        plain.release(looking);
    }

    fn check(&self, client: &RemoteVolume, handle: Handle, model: &[u8], offset: u64, len: u32) {
        let got = read(client, handle, offset, len).expect("read");
        let end = model.len().min((offset + u64::from(len)) as usize);
        let expected = &model[offset as usize..end];
        assert_eq!(got.len(), expected.len());
        let wrong = got.iter().zip(expected).position(|(got, expected)| got != expected);
        assert_eq!(wrong, None, "at {offset}, {len} bytes");
    }
}
