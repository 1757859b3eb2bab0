//! A sender of durable RPCs, as the loads drive it.
//!
//! A write is done when it is persistent, which is what the application waits for; a read when its answer is here: it changes nothing, so no FLUSH
//! is spent on it (section 5.5, data access patterns).

use super::load::Caller;
use super::store::{Requests, SCAN_MAX};
use anyhow::Context as _;
use cuttlefs_common::ids::ClientId;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rpc::durable::{Kind, Sender, Settings, Ticket, Wants};
use std::time::Duration;

/// Space a ring has for the largest requests; small ones fit more.
const DEPTH: usize = 64;
/// Largest ring's room for one request beyond which the depth is halved: 64 KiB objects get a ring of 2 MiB.
const LARGE: usize = 32 << 10;

/// One sender.
pub(super) struct DurableCaller {
    sender: Sender,
    requests: Requests,
    answer: Vec<u8>,
    last: Option<Ticket>,
}

impl DurableCaller {
    pub(super) fn connect(
        endpoint: &Endpoint,
        client: u128,
        kind: Kind,
        object_len: usize,
        batch: usize,
        scans: bool,
    ) -> anyhow::Result<Self> {
        let request_max = Requests::write_len(object_len, 1);
        let answer_max = object_len * if scans { SCAN_MAX as usize } else { 1 };
        let settings = Settings {
            batch,
            depth: if object_len > LARGE { DEPTH / 2 } else { DEPTH },
            answers: 8,
            patience: Duration::from_secs(10),
            ..Settings::new(kind, request_max, answer_max)
        };
        let device = SoftDevice::new(SoftOptions::default());
        let sender = Sender::connect(device, endpoint, ClientId(client), settings)
            .with_context(|| format!("{} cannot connect", kind.label()))?;
        Ok(Self { sender, requests: Requests::new(object_len), answer: Vec::new(), last: None })
    }

    /// Comes back to a receiver that was restarted.
    pub(super) fn resume(&mut self, endpoint: &Endpoint) -> anyhow::Result<()> {
        self.sender.resume(endpoint)?;
        Ok(())
    }

    /// Requests the receiver had when it ended, which were not sent again, and those that were.
    pub(super) fn kept_and_resent(&self) -> (u64, u64) {
        let figures = self.sender.figures();
        (figures.not_resent, figures.resent)
    }
}

impl Caller for DurableCaller {
    fn write(&mut self, keys: &[u32]) -> anyhow::Result<()> {
        for key in keys {
            self.requests.write(&[*key]);
            self.last = Some(self.sender.post(&self.requests.bytes, Wants::Persistence)?);
        }
        if let Some(last) = self.last {
            self.sender.wait_persistent(last)?;
        }
        Ok(())
    }

    fn read(&mut self, key: u32, count: u32) -> anyhow::Result<()> {
        self.requests.read(key, count);
        let ticket = self.sender.post(&self.requests.bytes, Wants::AnswerOnly)?;
        let status = self.sender.wait_answer(ticket, &mut self.answer)?;
        anyhow::ensure!(status == 0, "a read failed with {status}");
        self.requests.check(key, count, &self.answer)
    }

    fn slowed(&self) -> u64 {
        self.sender.figures().slowed
    }
}
