//! Finds the orders of operations under way together that explain the answers: a check of linearizability. It searches over how many operations each
//! client has done, and keeps each state that can be reached at such a point once.

use super::super::model::Model;
use super::fits::fits;
use super::op::{Answer, Op, Places};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// An operation with its answer, and the turns in which it began and ended.
pub struct Answered {
    pub client: usize,
    pub op: Op,
    pub answer: Answer,
    begun: u64,
    ended: u64,
    /// A crash may have undone the state that this answer shows, and cuttlefs promises nothing about that.
    pub unpromised: bool,
}

impl fmt::Debug for Answered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { client, op, answer, begun, ended, unpromised } = self;
        let said = match answer {
            Answer::Bytes(Ok(bytes)) => {
                format!("{} bytes, {:?} ...", bytes.len(), &bytes[..bytes.len().min(8)])
            }
            answer => format!("{answer:?}"),
        };
        let held = if *unpromised { " (not held)" } else { "" };
        write!(f, "client {client}, turns {begun} to {ended}: {op:?}: {said}{held}")
    }
}

impl Answered {
    /// An operation of `client` that began and ended in these turns.
    pub fn new(client: usize, op: &Op, answer: Answer, turns: Range<u64>) -> Self {
        Self { client, op: op.clone(), answer, begun: turns.start, ended: turns.end, unpromised: false }
    }

    /// Whether it ended before that turn.
    pub fn is_before(&self, turn: u64) -> bool {
        self.ended < turn
    }
}

/// All states in which the file system may be after `histories`, one history for each client, which began with `model`. `died`: whether a server died
/// meanwhile.
///
/// An operation that ended before another one began comes before it.
pub fn states(model: &Model, histories: &[Vec<Answered>], places: &Places, died: bool) -> Vec<Model> {
    let made = model.made.len();
    let total: usize = histories.iter().map(Vec::len).sum();
    let mut reached = BTreeMap::from([(vec![0; histories.len()], vec![kept(model)])]);
    for _ in 0..total {
        let mut next: BTreeMap<Vec<usize>, Vec<Model>> = BTreeMap::new();
        for (done, models) in &reached {
            for client in 0..histories.len() {
                let Some(answered) = histories[client].get(done[client]) else { continue };
                let must_wait = histories.iter().zip(done).any(|(history, done)| {
                    history.get(*done).is_some_and(|other| other.ended < answered.begun)
                });
                if must_wait {
                    continue;
                }
                let mut then = done.clone();
                then[client] += 1;
                let states = next.entry(then).or_default();
                for mut state in models.iter().flat_map(|model| behind(model, answered, places, died)) {
                    // The order in which inodes were made does not matter from here on.
                    state.made[made..].sort();
                    if !states.contains(&state) {
                        states.push(state);
                    }
                }
            }
        }
        reached = next;
    }
    let mut last: Vec<Model> = Vec::new();
    for state in reached.into_values().flatten() {
        let state = let_go(state, model);
        if !last.contains(&state) {
            last.push(state);
        }
    }
    last
}

/// The model, but with one more open of each inode, so that no inode goes with its last name. A server frees such an inode a little later, or much
/// later if clients may still come back for it.
fn kept(model: &Model) -> Model {
    let mut kept = model.clone();
    kept.nodes.values_mut().for_each(|node| node.opens += 1);
    kept
}

/// Takes back the opens that `kept` added, and frees inodes without a name that are not open.
fn let_go(mut state: Model, before: &Model) -> Model {
    for ino in before.nodes.keys() {
        state.node_mut(*ino).opens -= 1;
        state.settle(*ino);
    }
    state
}

/// The states after an operation. None if it could not have been answered so.
fn behind(model: &Model, answered: &Answered, places: &Places, died: bool) -> Vec<Model> {
    if answered.unpromised {
        return vec![model.clone()];
    }
    let doing = (answered.client, &answered.op);
    let mut states = Vec::new();
    let mut done = model.clone();
    if fits(&mut done, doing, places, &answered.answer, died) {
        states.push(done);
    }
    if is_about_what_is_gone(model, answered, places, died) {
        states.push(model.clone());
    }
    if died && let Some(done) = linked_and_gone(model, answered, places) {
        states.push(done);
    }
    states
}

/// Whether the operation was refused because an inode that it names has lost its last name and may have been freed.
fn is_about_what_is_gone(model: &Model, answered: &Answered, places: &Places, died: bool) -> bool {
    let is_gone = |ino: &InodeNo| !model.nodes.contains_key(ino) || model.nlink(*ino) == 0;
    let gone = answered.op.about(places).iter().any(is_gone);
    match answered.answer.refusal() {
        Some(Status::Stale | Status::NotFound) => gone,
        // A power loss may have brought a freed inode back, without a name. Until it is freed again the server knows that it is no directory.
        Some(Status::NotDirectory) => gone && died,
        _ => false,
    }
}

/// The state after a link that was made but not answered before the server died, if the inode then lost all its names and was freed: the new server
/// cannot know the link and answers `Stale`.
fn linked_and_gone(model: &Model, answered: &Answered, places: &Places) -> Option<Model> {
    let Op::Link { ino, .. } = answered.op else { return None };
    if answered.answer.refusal() != Some(Status::Stale) {
        return None;
    }
    let mut done = model.clone();
    let linked = Answer::Found(Ok(places.ino(ino)));
    fits(&mut done, (answered.client, &answered.op), places, &linked, true).then_some(done)
}
