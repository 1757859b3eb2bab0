//! Requests of `tenants` that are under way while their pages are cut off, punched, and given to another file, while their key ends, while the file is
//! removed, or while their tenant dies.

use crate::acts::Act;
use crate::dice::Dice;
use crate::landlord::{Held, Landlord, PAGE, SPAN};
use crate::oracle::Oracle;
use crate::tenants::{Tenant, Tenants};
use cuttlefs_common::rdma::WcStatus;
use cuttlefs_common::rpc::Request;
use std::time::Duration;

/// The most WRITEs under way at a time.
const BURST: usize = 6;

/// A time in which the server does a few requests, or none.
fn pause(dice: &Dice) -> Duration {
    Duration::from_micros(if dice.chance(50) { 0 } else { dice.number() % 150 })
}

/// The whole pages that are granted, and before the end of the file.
fn granted(held: &Held, size: u64) -> Vec<u64> {
    (0..size / PAGE).filter(|page| held.covers(page * PAGE, (page + 1) * PAGE)).collect()
}

impl Tenants {
    /// Sends WRITEs of whole granted pages, and an APPEND, and takes away what they need before they are answered.
    pub fn burst(&mut self, who: usize, landlord: &mut Landlord, dice: &Dice, oracle: &mut Oracle) {
        let fits = |held: &Held| {
            held.tenant == who && !held.is_over && held.key.expiry_ms.is_none() && held.key.rights.write
        };
        let Some(at) = landlord.held.iter().position(fits) else {
            return self.open(who, landlord, dice, oracle);
        };
        let (filekey, key) = (landlord.held[at].filekey, landlord.held[at].key);
        if granted(&landlord.held[at], landlord.size()).is_empty() {
            landlord.set_size(SPAN - dice.number() % (3 * PAGE), oracle);
            self.grant_range(who, at, (key.offset, key.len), landlord, oracle);
        }
        let size = landlord.size();
        let mut pages = granted(&landlord.held[at], size);
        if pages.is_empty() {
            return;
        }
        while pages.len() > BURST {
            pages.swap_remove(dice.below(pages.len()));
        }
        let mut acts: Vec<Act> = (pages.iter())
            .map(|page| Act::Write { offset: page * PAGE, bytes: landlord.fresh(PAGE) })
            .collect();
        let append = landlord.fresh(1 + dice.number() % 3000);
        if dice.chance(50) && landlord.held[at].holds(size, size + append.len() as u64) {
            acts.push(Act::Append { bytes: append });
        }
        let taken = dice.below(5);
        if taken == 4 {
            acts.iter().for_each(|act| self.all[who].send(act, filekey));
            return self.die(who, at, acts, landlord, dice, oracle);
        }
        let pauses: Vec<Duration> = acts.iter().map(|_| pause(dice)).collect();
        let (before, tenant) = (pause(dice), &mut self.all[who]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for (act, pause) in acts.iter().zip(pauses) {
                    tenant.send(act, filekey);
                    std::thread::sleep(pause);
                }
            });
            std::thread::sleep(before);
            match taken {
                0 => landlord.set_size(0, oracle),
                1 => landlord.punch(0, 2 * SPAN, oracle),
                2 => {
                    // The landlord forgets no key that is good.
                    let bound = landlord.bound.iter().position(|bound| bound.key.number == key.number);
                    landlord.unbind(bound.expect("its key is good"), oracle);
                }
                _ => {
                    landlord.unlink(oracle);
                    landlord.leave(oracle);
                }
            }
        });
        let (answers, status) = self.all[who].answers(acts.len());
        self.counts.before += answers.len() as u64;
        if let Some(status) = status {
            self.counts.behind += 1;
            let is_typed = matches!(
                status,
                WcStatus::RemoteAccess | WcStatus::RemoteNoSpace | WcStatus::RemoteOperation
            );
            assert!(is_typed, "{status:?}");
            self.all[who].come_back(landlord, oracle);
        }
        let done = acts.into_iter().zip(&answers);
        match taken {
            // Whatever was done before is cut off or made zeros. What came behind was refused.
            0 => landlord.set_size(size, oracle),
            1 => done.for_each(|(act, _)| {
                if let Act::Append { bytes } = act
                    && landlord.size() == size
                {
                    landlord.put(size, &vec![0; bytes.len()]);
                }
            }),
            2 => done.for_each(|(act, header)| act.done(landlord, &key, header, &[])),
            // It was done to a file that is no more.
            _ => {}
        }
        landlord.check(oracle);
        landlord.rewrite_neighbour(oracle);
        landlord.check(oracle);
    }

    /// The tenant dies with requests sent, and one half sent. Its session ends with it, or goes on without these grants.
    fn die(
        &mut self,
        who: usize,
        at: usize,
        acts: Vec<Act>,
        landlord: &mut Landlord,
        dice: &Dice,
        oracle: &mut Oracle,
    ) {
        self.counts.died += 1;
        let filekey = landlord.held[at].filekey;
        let half = Act::Write { offset: landlord.held[at].grants[0].start, bytes: landlord.fresh(PAGE) };
        let (packet, payload) = half.packet(filekey);
        self.all[who].asking.wire.put_part(packet, payload, dice.below(4000));
        self.all[who].come_back(landlord, oracle);
        let give_back = |filekey| Request::ReturnGrant { filekey, offset: 0, len: 2 * SPAN };
        // What was under way is done when grants have been given back.
        if dice.chance(50) {
            self.ask(who, landlord, &Request::Detach, oracle, |_| ()).expect("its session");
            landlord.end_held(|held| held.tenant == who);
            let own = landlord.opened.filekey;
            landlord.ask(&give_back(own), oracle, |_| ()).expect("its own file");
            self.all[who] = Tenant::new(landlord, dice, oracle);
        } else {
            self.ask(who, landlord, &give_back(filekey), oracle, |_| ()).expect("its own grants");
            landlord.held[at].grants.clear();
        }
        // Requests of a connection are done in their order, each whole.
        let (found, mut goes_on) = (landlord.house(oracle), true);
        for act in acts {
            let (offset, bytes) = match act {
                Act::Write { offset, bytes } => (offset, bytes),
                Act::Append { bytes } => (landlord.size(), bytes),
                _ => unreachable!("no other is sent"),
            };
            let there = found.get(offset as usize..offset as usize + bytes.len());
            goes_on &= there == Some(&bytes[..]);
            if goes_on {
                landlord.put(offset, &bytes);
            }
        }
        landlord.check(oracle);
        landlord.rewrite_neighbour(oracle);
        landlord.check(oracle);
    }
}
