//! `cuttlefs bench rpc`: durable RPC beside seven other ways to do an RPC over RDMA (Duan et al., SC '21, section 5).
//!
//! Receiver and senders run in this process, over a link of the software RNIC, on one object store (`store`) that is
//! persistent before anything is answered. `system` names what is compared; `durable` drives `fs-common`'s durable RPC,
//! `comparator` and `comparator_server` the communication patterns of the paper's Figure 2 over the same verbs. `load`
//! runs senders, `ycsb` and `failure` are loads of their own, `figures` says what each figure runs, `paper` what the paper
//! says, `results` shows it.

mod comparator;
mod comparator_server;
mod durable;
mod failure;
mod figures;
mod load;
mod paper;
mod results;
mod run;
mod site;
mod store;
mod system;
mod ycsb;

pub use run::{RpcArgs, run_rpc};
