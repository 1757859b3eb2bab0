//! The node's one thread with something to do: control messages, chains that faulted, ticks, and chains where no RNIC executes them.

use super::super::wire::{Answer, MAPPED_PER_ANSWER, Question, encode, parse};
use super::client::Client;
use super::connections::{FAULT, RECEIVE, Role};
use super::processor::About;
use super::{CLIENTS_MAX, Shared, State, TICK};
use crate::ids::QpNumber;
use crate::rdma::{Completion, QueuePair, WcStatus};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Completions taken at once.
const AT_ONCE: usize = 64;

/// Serves until the node is dropped.
pub(super) fn serve(shared: &Shared) {
    let mut completions = Vec::with_capacity(AT_ONCE);
    let mut ticked = Instant::now();
    while !shared.stopping.load(Ordering::Acquire) {
        shared.cq.wait(TICK);
        completions.clear();
        while shared.cq.poll(&mut completions, AT_ONCE) == AT_ONCE {}
        for completion in completions.drain(..) {
            shared.act(completion);
        }
        if ticked.elapsed() >= TICK {
            ticked = Instant::now();
            shared.tick(ticked);
        }
        if shared.by_processor {
            shared.go_on();
        }
    }
    for qp in shared.state.lock().connections.of(|_| true) {
        qp.close();
    }
}

impl Shared {
    fn act(&self, completion: Completion) {
        match (completion.wr_id, completion.status) {
            (FAULT, _) => {
                self.faults.fetch_add(1, Ordering::Relaxed);
                self.ended(completion.qp);
            }
            (RECEIVE, WcStatus::Success) => self.question(completion.qp, completion.byte_len),
            (RECEIVE, _) => self.ended(completion.qp),
            (name, status) => match (About::of(name), status) {
                (Some(about), WcStatus::Success) => self.done(about, &completion),
                (Some(_), _) => self.ended(completion.qp),
                // An answer that could not be sent: the connection's receive tells the same.
                (None, _) => {}
            },
        }
    }

    /// A message to a queue that this thread executes, or the end of what it told.
    fn done(&self, about: About, completion: &Completion) {
        let State { clients, connections, .. } = &mut *self.state.lock();
        if let Some(Role::Chains(id, kind)) = connections.get(completion.qp).map(|connection| connection.role)
            && let Some(client) = clients.get_mut(&id)
        {
            client.done(kind, about, completion.byte_len);
        }
    }

    /// Executes chains. A queue that ends may have the others' messages go on: the free page queue is set right then.
    fn go_on(&self) {
        loop {
            let ended: Vec<_> = self.state.lock().clients.values_mut().flat_map(Client::go_on).collect();
            if ended.is_empty() {
                return;
            }
            for (number, is_fault) in ended {
                self.faults.fetch_add(u64::from(is_fault), Ordering::Relaxed);
                self.ended(number);
            }
        }
    }

    /// Answers a question.
    fn question(&self, number: QpNumber, len: u32) {
        self.control_messages.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state.lock();
        let bytes = state.connections.question(number, len);
        let Some(role) = state.connections.get(number).map(|connection| connection.role) else { return };
        let answer = match parse(&bytes) {
            Ok(question) => self.answer(&mut state, number, role, question),
            Err(error) => Err(error.to_string()),
        };
        let (answer, is_over) = match answer {
            Ok(answer) => (answer, false),
            Err(reason) => (Answer::Refused { reason }, true),
        };
        match encode(&answer) {
            Ok(bytes) => state.connections.answer(number, &bytes),
            Err(error) => tracing::error!("an answer of the memory node cannot be encoded: {error}"),
        }
        drop(state);
        if is_over {
            self.ended(number);
        }
    }

    fn answer(
        &self,
        state: &mut State,
        number: QpNumber,
        role: Role,
        question: Question,
    ) -> Result<Answer, String> {
        match (role, question) {
            (Role::New, Question::Figures) => Ok(Answer::Figures(self.figures(state))),
            (Role::New, Question::Join { pages }) => {
                if state.clients.len() >= CLIENTS_MAX {
                    return Err(format!(
                        "the memory node has {CLIENTS_MAX} clients already; try again later"
                    ));
                }
                let client = Client::new(self, pages, number)?;
                let token = client.token;
                state.last_client += 1;
                let id = state.last_client;
                state.clients.insert(id, client);
                if let Some(connection) = state.connections.get(number) {
                    connection.role = Role::Control(id);
                }
                let lease_seconds = self.options.lease.as_secs().clamp(1, 3600) as u32;
                Ok(Answer::Joined { token, budget: self.options.budget, lease_seconds })
            }
            (Role::New, Question::Attach { token, kind }) => {
                let State { clients, connections, .. } = state;
                let found = clients.iter_mut().find(|(_, client)| client.token == token);
                let (id, client) = found.ok_or("no client has this token; join again")?;
                if let Some(former) = client.forget(kind) {
                    connections.remove(former);
                }
                let connection = connections.get(number).ok_or("the connection is gone")?;
                connection.role = Role::Chains(*id, kind);
                client.arm(self, kind, &connection.qp)?;
                Ok(Answer::Attached)
            }
            (Role::Control(id), question) => {
                let client = state.clients.get_mut(&id).ok_or("the client's lease is over; join again")?;
                client.heard();
                match question {
                    Question::Beat => Ok(Answer::Heard),
                    Question::Mapped { first } => {
                        let pages = client.table.pages;
                        let end = first.saturating_add(MAPPED_PER_ANSWER).min(pages);
                        let mut bits = vec![0u8; (end.saturating_sub(first) as usize).div_ceil(8)];
                        for page in (first.min(end)..end).filter(|page| client.table.get(*page) != 0) {
                            let at = (page - first) as usize;
                            bits[at / 8] |= 1 << (at % 8);
                        }
                        Ok(Answer::Mapped { bits })
                    }
                    Question::Why { kind } => Ok(Answer::Broke { why: client.why(kind) }),
                    Question::Join { .. } | Question::Attach { .. } | Question::Figures => {
                        Err("the client has joined on this connection already".to_owned())
                    }
                }
            }
            (Role::New | Role::Chains(..), _) => {
                Err("a client joins first; run the same release on both".to_owned())
            }
        }
    }

    /// A connection is over: its chain faulted, its peer is gone, or it was refused.
    fn ended(&self, number: QpNumber) {
        let mut state = self.state.lock();
        let Some(role) = state.connections.get(number).map(|connection| connection.role) else { return };
        state.connections.remove(number);
        let again = match role {
            Role::New => Vec::new(),
            Role::Chains(id, kind) => {
                let is_wrong = state.clients.get_mut(&id).is_some_and(|client| client.stopped(self, kind));
                if is_wrong { self.set_right(&mut state) } else { Vec::new() }
            }
            Role::Control(id) => self.let_go(&mut state, id),
        };
        drop(state);
        resume(&again);
    }

    /// Takes back what a client has.
    fn let_go(&self, state: &mut State, id: u32) -> Vec<Arc<dyn QueuePair>> {
        let Some(mut client) = state.clients.remove(&id) else { return Vec::new() };
        self.gone.fetch_add(1, Ordering::Relaxed);
        state.connections.remove(client.control);
        for number in client.queue_pairs() {
            state.connections.remove(number);
        }
        for kind in super::Kind::ALL {
            client.forget(kind);
            state.past[kind.index()] += client.chains(kind);
        }
        state.past_entries += client.entries();
        self.set_right(state)
    }

    /// Makes the free page queue anew. Returns the queue pairs whose messages may have waited meanwhile.
    fn set_right(&self, state: &mut State) -> Vec<Arc<dyn QueuePair>> {
        let closed = self.gate.close();
        let tables: Vec<_> = state.clients.values().map(|client| &client.table).collect();
        let found = self.pages.set_right(&tables);
        state.clients.values_mut().for_each(Client::recount);
        drop(closed);
        self.set_right.fetch_add(1, Ordering::Relaxed);
        if found.wrong > 0 {
            tracing::error!(found.wrong, "translation tables named pages that are none or another entry's");
        }
        for client in state.clients.values_mut() {
            client.move_limit();
        }
        state.connections.of(|role| matches!(role, Role::Chains(..)))
    }

    fn tick(&self, now: Instant) {
        let mut state = self.state.lock();
        let over = state.connections.over(now);
        let mut again = Vec::new();
        let silent: Vec<u32> = (state.clients.iter())
            .filter(|(_, client)| client.is_silent(now, self.options.lease))
            .map(|(id, _)| *id)
            .collect();
        for id in silent {
            tracing::info!(client = id, "a client of the memory node was silent for its lease");
            again = self.let_go(&mut state, id);
        }
        let mut moved = false;
        for client in state.clients.values_mut() {
            moved |= client.move_limit();
        }
        if moved {
            again = state.connections.of(|role| matches!(role, Role::Chains(..)));
        }
        drop(state);
        resume(&again);
        for (number, _) in over {
            self.ended(number);
        }
    }
}

fn resume(queue_pairs: &[Arc<dyn QueuePair>]) {
    queue_pairs.iter().for_each(|qp| qp.resume());
}
