//! Messages and places that the bytes say.

use super::stranger::Feed;
use super::{BUFFER, LEN, NO_KEY, PAGE, PAGES, World, fresh};
use cuttlefs_common::np::{
    INLINE_MAX, Message, NP_MESSAGE_LEN, PIECE_MAX, Reply, Request, RequestOp, Status,
};

impl World {
    /// An offset in the region, at its end, or anywhere.
    pub(super) fn offset(&self, feed: &mut Feed<'_>) -> u64 {
        match feed.below(16) {
            0 => LEN - 16 + feed.below(32),
            1 => u64::MAX - feed.below(32),
            2 => feed.eight(),
            3 => feed.below(PAGES) * PAGE,
            4 => (1 + feed.below(PAGES - 1)) * PAGE - feed.below(16),
            5 | 6 => feed.two() * 8 % LEN,
            _ => feed.two() * 3 % LEN,
        }
    }

    pub(super) fn message(&mut self, feed: &mut Feed<'_>) -> Vec<u8> {
        let (tag, offset) = (self.number(), self.offset(feed));
        let (sink, source) = (self.sink.rkey().0, self.source.rkey().0);
        let len = match feed.below(8) {
            0 => PIECE_MAX,
            1 => INLINE_MAX as u32,
            2 => 1,
            3 | 4 => 1 + feed.below(255) as u32,
            _ => 1 + feed.two() as u32,
        };
        // Now and then one more or one less than a message may be of.
        let strays = |most: u32, feed: &mut Feed<'_>| match feed.below(64) {
            0 => most + 1,
            1 => 0,
            _ => 1 + (len - 1) % most,
        };
        let (inline, len) = (strays(INLINE_MAX as u32, feed), strays(PIECE_MAX, feed));
        // In most cases a buffer that is there.
        let buffer = |good: u32, feed: &mut Feed<'_>| {
            let rkey = match feed.below(64) {
                0 => sink,
                1 => source,
                2 => NO_KEY,
                3 => feed.below(40) as u32,
                _ => good,
            };
            let address = match feed.below(32) {
                0 => BUFFER - feed.below(32),
                1 => u64::MAX - feed.below(32),
                _ => feed.two() % (BUFFER - u64::from(len).min(BUFFER - 1)),
            };
            (rkey, address)
        };
        let op = match feed.below(10) {
            0 | 1 => RequestOp::ReadInline(inline),
            2 | 3 => RequestOp::WriteInline(fresh(tag, inline.into())),
            4 | 5 => {
                let (rkey, address) = buffer(sink, feed);
                RequestOp::Read { len, rkey, address }
            }
            6 | 7 => {
                let (rkey, address) = buffer(source, feed);
                RequestOp::Write { len, rkey, address }
            }
            8 => {
                let hits = self.word(offset).filter(|_| feed.below(2) == 0);
                let expect = hits.unwrap_or(u64::from(tag));
                RequestOp::CompareSwap { expect, swap: u64::from(tag) | 1 << 63 }
            }
            _ => RequestOp::FetchAdd(feed.eight()),
        };
        let message = match feed.below(64) {
            0 => Message::Hello,
            1 => Message::Reply(Reply { tag, status: Status::Done, old: 0, bytes: Vec::new() }),
            2 => self.welcome.map_or(Message::Hello, Message::Welcome),
            _ => Message::Request(Request { tag, offset, op }),
        };
        let mut bytes = message.encode();
        match feed.below(50) {
            0 => bytes = feed.take(feed.0.len() as u64 % 120),
            1 => bytes.truncate(feed.two() as usize % bytes.len()),
            2 => bytes.extend(feed.take(1 + feed.0.len() as u64 % 40)),
            3 | 4 => {
                for _ in 0..=feed.below(3) {
                    let at = feed.below(NP_MESSAGE_LEN as u64) as usize;
                    // The tag stays, so that answers can be told apart.
                    let at = if (8..12).contains(&at) { at + 4 } else { at };
                    bytes[at] ^= 1 << feed.below(8);
                }
            }
            _ => {}
        }
        bytes
    }
}
