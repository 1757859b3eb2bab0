//! The TeRM paper's evaluation on cuttlefs: how fast data that memory holds in part is read and written.
//!
//! * `bench region` measures one large file, through the client's library and not through a mount: figures 8 to 15.
//! * `bench octopus` looks a file up before each access, from several processes: figure 16.
//! * `bench kv` gets values out of a hash table in one file: figure 17.
//!
//! A scratch pool (`pool`) is served by servers of our own (`server`), each with the flags of a policy (`policy`) and,
//! where the kernel caches its data, in a memory cgroup (`cgroup`). Threads (`load`) read and write (`file_load`)
//! self-describing bytes (`content`) at places that follow Zipf's law (`positions`). `campaign` runs the points of a figure
//! (`figures`), `disk` asks fio what the disk alone can do, `point` says what would have been possible, `paper` what
//! the paper says; `results` shows it. `interrupt` ends all that on Ctrl-C.

mod campaign;
mod cgroup;
mod content;
mod disk;
mod dynamic;
mod figures;
mod file_load;
mod interrupt;
mod kv;
mod kv_table;
mod load;
mod octopus;
mod octopus_client;
mod paper;
mod point;
mod policy;
mod pool;
mod positions;
mod results;
mod run;
mod server;
mod settings;
mod volume;

pub(in crate::bench) use interrupt::{check as check_interrupt, watch as watch_interrupts};
pub use kv::{KvArgs, run_kv};
pub use octopus::{OctopusArgs, run_octopus};
pub use octopus_client::{OctopusClientArgs, run_octopus_client};
pub(in crate::bench) use positions::Positions;
pub use run::{RegionArgs, run_region};
