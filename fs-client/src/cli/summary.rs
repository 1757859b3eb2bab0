//! The part of a status that a person needs: a screenful. `--all` shows all of it, `--json` all of it for programs.
//!
//! A line is left out where the status lacks its figures, so half of a status (a server that is away, an older one) makes half of
//! a summary. Faults come last, under `problems`: the table of docs/operations.md, "What to watch".

use crate::file::volume::UnsyncedChanges;
use cuttlefs_common::rdma::hop_advice;
use cuttlefs_common::size::ByteSize;
use serde_json::Value;

/// The width of the first column.
const LABEL_LEN: usize = 12;
/// The end of a line, and the first column of the next one of the same figure.
const CONTINUED: &str = "\n            ";
/// What stands between the parts of a message: what is the matter, and what to do.
pub(super) const PARTS: &str = "; ";
/// The most clients that are named, and the most rules of the export.
const NAMED_CLIENTS: usize = 8;
const NAMED_RULES: usize = 8;
/// A pool is nearly full if less than one part of this many is free.
const FREE_SHARE: u64 = 10;

/// A status as lines of text.
pub(super) fn summary(status: &Value) -> String {
    let lines = [
        ("version", version(status)),
        ("links", links(status)),
        ("RNIC", server_rnics(status)),
        ("trust", trust(status)),
        ("page window", page_window(status)),
        ("durability", text(status, "/durability").map(ToOwned::to_owned)),
        ("durable RPC", durable_rpc(status)),
        ("space", space(status)),
        ("memory", memory(status)),
        ("clients", clients(status)),
        ("exports", exports(status)),
        ("recovery", recovery(status)),
        ("mount", mount(status)),
        ("its RNIC", status.pointer("/mount/hardware").and_then(hardware)),
        ("unsynced", unsynced(status)),
    ];
    let problems = told_once(problems(status));
    let first = if problems.is_empty() { "none known" } else { &problems[0] };
    let more = problems.iter().skip(1).map(|problem| ("", problem.as_str()));
    let lines = lines.iter().filter_map(|(label, line)| Some((*label, line.as_deref()?)));
    let all = lines.chain([("problems", first)]).chain(more);
    all.map(|(label, line)| format!("{label:LABEL_LEN$}{}\n", line.replace('\n', CONTINUED))).collect()
}

fn number(status: &Value, pointer: &str) -> Option<u64> {
    status.pointer(pointer)?.as_u64()
}

fn text<'a>(status: &'a Value, pointer: &str) -> Option<&'a str> {
    status.pointer(pointer)?.as_str()
}

fn is(status: &Value, pointer: &str) -> bool {
    status.pointer(pointer).and_then(Value::as_bool).unwrap_or(false)
}

fn size(status: &Value, pointer: &str) -> Option<ByteSize> {
    number(status, pointer).map(ByteSize)
}

fn pages(status: &Value, pointer: &str) -> Option<ByteSize> {
    let page_bytes = number(status, "/pool/page_bytes")?;
    number(status, pointer).map(|pages| ByteSize(pages.saturating_mul(page_bytes)))
}

fn version(status: &Value) -> Option<String> {
    let mut line = text(status, "/version")?.to_owned();
    if let Some(pid) = number(status, "/pid") {
        line += &format!(", process {pid}");
    }
    if let Some(seconds) = number(status, "/uptime_seconds") {
        line += &format!(", up {}", time(seconds));
    }
    Some(line)
}

fn time(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn links(status: &Value) -> Option<String> {
    let each = status.pointer("/rnics")?.as_array()?.iter().filter_map(links_of);
    Some(each.collect::<Vec<_>>().join("; "))
}

/// The links of one RNIC, and what protects them.
fn links_of(rnic: &Value) -> Option<String> {
    let links: Vec<_> = rnic.pointer("/links")?.as_array()?.iter().filter_map(Value::as_str).collect();
    let schemes = links.iter().filter_map(|link| Some(link.split_once("://")?.0));
    let network = schemes.into_iter().find(|scheme| matches!(*scheme, "tcp" | "rdma"));
    let security = network.zip(text(rnic, "/network_security"));
    let security = security.map_or_else(String::new, |(scheme, kind)| format!(" ({scheme}: {kind})"));
    Some(format!("{}{security}", links.join(" ")))
}

/// What a server says that trusts its clients.
fn trust(status: &Value) -> Option<String> {
    let trusts = is(status, "/trust_clients");
    trusts.then(|| "every client may read every file (trust_clients; docs/security.md)".to_owned())
}

/// The server's RNICs that are hardware.
fn server_rnics(status: &Value) -> Option<String> {
    let each = status.pointer("/rnics")?.as_array()?.iter();
    let each: Vec<_> = each.filter_map(|rnic| hardware(rnic.pointer("/hardware")?)).collect();
    (!each.is_empty()).then(|| each.join("; "))
}

/// What the RNICs of trusted clients read pages from, where the server has RNICs.
fn page_window(status: &Value) -> Option<String> {
    server_rnics(status)?;
    let kind = text(status, "/page_window/kind")?;
    let shown = number(status, "/page_window/shown_pages");
    Some(match shown.zip(number(status, "/page_window/shown_pages_bound")) {
        _ if is(status, "/page_window/is_lost") => format!("{kind}, lost; pinned frames instead"),
        Some((shown, bound)) => format!("{kind}, {shown} pages shown of {bound} at most"),
        None => kind.to_owned(),
    })
}

/// An RNIC of either side: its device, and what it holds.
fn hardware(of: &Value) -> Option<String> {
    let mut line = format!("{} port {}", text(of, "/device")?, number(of, "/port")?);
    line += &format!(" ({})", text(of, "/link_layer")?);
    if let Some(index) = number(of, "/gid_index") {
        line += &format!(", GID {index} {}", text(of, "/gid")?);
    }
    if let Some(mtu) = number(of, "/path_mtu_bytes") {
        line += &format!(", path MTU {mtu}");
    }
    line += &format!(", {} queue pairs, {} pinned", number(of, "/queue_pairs")?, size(of, "/pinned_bytes")?);
    if let Some(bound) = size(of, "/pinned_bound") {
        line += &format!(" of {bound}");
    }
    Some(line)
}

fn durable_rpc(status: &Value) -> Option<String> {
    Some(format!("{}, synced {}", text(status, "/durable_rpc/kind")?, text(status, "/durable_rpc/synced")?))
}

fn space(status: &Value) -> Option<String> {
    let (free, all) = (pages(status, "/pool/free_pages")?, pages(status, "/pool/pages")?);
    let files = number(status, "/files/inodes").map(|inodes| format!(", {inodes} files and directories"));
    Some(format!("{free} of {all} free{}", files.unwrap_or_default()))
}

fn memory(status: &Value) -> Option<String> {
    let page_bytes = number(status, "/pool/page_bytes")?;
    let dirty = number(status, "/frames/dirty")?.saturating_mul(page_bytes);
    let used = number(status, "/frames/used")?.saturating_mul(page_bytes);
    let all = size(status, "/frames/bytes")?;
    Some(format!("{} of {all} used, {} of it not written back", ByteSize(used), ByteSize(dirty)))
}

fn clients(status: &Value) -> Option<String> {
    let listed = status.pointer("/sessions/listed")?.as_array()?;
    let labels: Vec<_> = listed.iter().filter_map(|one| one.get("label")?.as_str()).collect();
    let more = labels.len().saturating_sub(NAMED_CLIENTS);
    let named = labels.iter().take(NAMED_CLIENTS).copied().collect::<Vec<_>>().join(" ");
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    Some(format!(
        "{} of {} at most: {named}{more}",
        number(status, "/sessions/count")?,
        number(status, "/sessions/bound")?
    ))
}

/// The rules of the export, a line each, or how many there are for who may not know them.
fn exports(status: &Value) -> Option<String> {
    let count = number(status, "/exports/count")?;
    let Some(rules) = status.pointer("/exports/rules").and_then(Value::as_array) else {
        return Some(format!("{count} (shown to who may have the whole pool as root)"));
    };
    let more = rules.len().saturating_sub(NAMED_RULES);
    let more = (more > 0).then(|| format!("and {more} more"));
    let lines = rules.iter().take(NAMED_RULES).filter_map(export).chain(more);
    Some(lines.collect::<Vec<_>>().join("\n"))
}

/// One rule, in the words of cuttlefs.toml.
fn export(rule: &Value) -> Option<String> {
    let peers: Vec<_> = rule.get("for")?.as_array()?.iter().filter_map(Value::as_str).collect();
    let mut line = format!("{} for {}", text(rule, "/path")?, peers.join(" "));
    if is(rule, "/read_only") {
        line += ", read_only";
    }
    for squash in ["root_squash", "all_squash"] {
        if let Some(account) = rule.get(squash).and_then(Value::as_str) {
            line += &format!(", {squash} {account}");
        }
    }
    if let Some(speaks) = rule.get("speaks_for_others").and_then(Value::as_bool) {
        line += &format!(", speaks_for_others {speaks}");
    }
    Some(line)
}

fn recovery(status: &Value) -> Option<String> {
    let awaited = number(status, "/recovery/awaited_clients")?;
    let (data, locks) = (is(status, "/recovery/data_waits"), is(status, "/recovery/locks_wait"));
    let awaited = match awaited {
        1 => "1 client of the server before is awaited".to_owned(),
        _ => format!("{awaited} clients of the server before are awaited"),
    };
    Some(match (data, locks) {
        (false, false) => "done".to_owned(),
        (true, _) => format!("{awaited}; files they changed wait"),
        (false, true) => format!("{awaited}; new locks wait"),
    })
}

fn mount(status: &Value) -> Option<String> {
    let mut line = text(status, "/mount/mountpoint")?.to_owned();
    if let Some(pid) = number(status, "/mount/pid") {
        line += &format!(", process {pid}");
    }
    if let Some(log) = text(status, "/mount/log") {
        line += &format!(", log {log}");
    }
    Some(line)
}

fn unsynced(status: &Value) -> Option<String> {
    let changes = UnsyncedChanges {
        files: number(status, "/mount/unsynced_files")?,
        bytes: number(status, "/mount/unsynced_bytes")?,
    };
    Some(if changes == UnsyncedChanges::default() {
        "nothing".to_owned()
    } else if is(status, "/mount/server_is_away") || text(status, "/server_error").is_some() {
        format!("{changes} that are lost if this mount ends")
    } else {
        format!("{changes}; only this mount has them if the server is killed")
    })
}

/// The lease, if it ended in a silence of so many seconds.
fn lease_before(status: &Value, silence_seconds: u64) -> Option<u64> {
    number(status, "/mount/lease_seconds").filter(|lease| silence_seconds > *lease)
}

/// The parts of a problem that no problem before it has told: errors of one cause end with the same advice.
fn told_once(problems: Vec<String>) -> Vec<String> {
    let mut told: Vec<String> = Vec::new();
    for problem in problems {
        let is_new = |part: &&str| !told.iter().any(|before| before.split(PARTS).any(|known| known == *part));
        let mut parts = problem.split(PARTS);
        let first = parts.next().into_iter();
        let rest = parts.filter(|part| !part.is_empty()).filter(is_new);
        let text = first.chain(rest).collect::<Vec<_>>().join(PARTS);
        told.push(text);
    }
    told
}

/// What to look at behind a silence over an RNIC: a way that drops its large packets.
fn hops(status: &Value) -> String {
    let of = status.pointer("/mount/hardware");
    let advice = of.and_then(|of| hop_advice(text(of, "/link_layer")?, number(of, "/path_mtu_bytes")?));
    advice.map_or_else(String::new, |advice| format!("{PARTS}{advice}"))
}

/// The problems that somebody should look after.
fn problems(status: &Value) -> Vec<String> {
    let mut problems = Vec::new();
    if is(status, "/mount/server_is_away") {
        let because = text(status, "/mount/server_away_because").unwrap_or("it does not answer");
        let since = number(status, "/mount/server_away_seconds").unwrap_or(0);
        let lost = lease_before(status, since).map_or_else(String::new, |lease| {
            format!(
                "; if it was not down itself, this mount's locks have ended with the lease of {}",
                time(lease)
            )
        });
        let hops = hops(status);
        problems.push(format!("the server has been away for {}{lost}: {because}{hops}", time(since)));
    } else if let Some(error) = text(status, "/server_error") {
        problems.push(format!("the server does not answer: {error}"));
    }
    if let Some(because) = text(status, "/mount/unheard_because") {
        let since = number(status, "/mount/unheard_seconds").unwrap_or(0);
        let locks = match (lease_before(status, since), number(status, "/mount/lease_seconds")) {
            (Some(lease), _) => format!(
                "longer than the lease of {}: its locks have ended, unless programs used it all the time",
                time(lease)
            ),
            (None, Some(lease)) => {
                format!("and its locks end when it is not used for the lease of {}", time(lease))
            }
            (None, None) => "and its locks end when it is not used for a lease".to_owned(),
        };
        let hops = hops(status);
        problems
            .push(format!("the mount has sent no heartbeats for {}, {locks}: {because}{hops}", time(since)));
    }
    let servers = status.pointer("/rnics").and_then(Value::as_array).into_iter().flatten();
    let servers = servers.filter_map(|rnic| Some(("the server", rnic.pointer("/hardware")?)));
    let ours = status.pointer("/mount/hardware").map(|of| ("this mount", of));
    for (whose, of) in servers.chain(ours) {
        let (device, port) = (text(of, "/device").unwrap_or("?"), number(of, "/port").unwrap_or(0));
        if let Some(state) = text(of, "/state").filter(|state| !state.contains("ACTIVE")) {
            problems.push(format!("port {port} of {device}, the RNIC of {whose}, is not active ({state})"));
        }
        let mtu = number(of, "/path_mtu_bytes").zip(number(of, "/max_mtu_bytes"));
        if let Some((mtu, most)) = mtu.filter(|(mtu, most)| mtu < most) {
            problems.push(format!(
                "the path MTU of {device}, the RNIC of {whose}, is {mtu} and could be {most}: give the network interface a larger MTU at both ends and \
                 on the way (`ip link set IFACE mtu 4200`), then mount again"
            ));
        }
        let ending = number(of, "/ending").zip(number(of, "/ending_bound"));
        if let Some((ending, _)) = ending.filter(|(ending, bound)| ending >= bound) {
            problems.push(format!(
                "the kernel does not let go of {ending} connections of {whose} by {device} that are over: its connection manager hangs; stop the \
                 server and unmount what uses the device, then take it away and add it again (`rdma link`), or load its driver again"
            ));
        }
    }
    if is(status, "/page_window/is_lost") {
        problems.push(
            "the window of pages is lost, and clients read in the pinned frames: the server's log says why; restart the server to have it again"
                .to_owned(),
        );
    }
    if let Some(death) = text(status, "/mount/death") {
        problems.push(death.to_owned());
    }
    if let Some(error) = text(status, "/mount/error") {
        problems.push(format!("the mount does not answer: {error}"));
    }
    for (pointer, what) in [
        ("/pages/rotten", "reads met pages that do not match their checksums"),
        ("/scrub/last/rotten", "pages do not match their checksums, as the last scrub found"),
        ("/pages/read_errors", "reads of a disk have failed"),
        ("/pages/write_errors", "writes to a disk have failed"),
        ("/metadata/failures", "uses of the metadata or its log have failed: changes may be refused"),
        (
            "/files/closed",
            "files are closed until the server is restarted: they could not be cut or removed whole",
        ),
        ("/connections/refused", "connections have been refused since the server started; its log says why"),
    ] {
        if let Some(count) = number(status, pointer).filter(|count| *count > 0) {
            problems.push(format!("{count} {what}"));
        }
    }
    let free = number(status, "/pool/free_pages").zip(number(status, "/pool/pages"));
    if let Some((free, all)) = free.filter(|(free, all)| *free < all / FREE_SHARE) {
        problems.push(format!("the pool is nearly full: {free} of {all} pages are free"));
    }
    let room = size(status, "/metadata/room_bytes").zip(size(status, "/metadata/reserve_bound"));
    if let Some((room, reserve)) = room.filter(|(room, reserve)| room.0 < reserve.0.saturating_mul(2)) {
        problems.push(format!(
            "the file system of meta/ is nearly full: {room} left, and new names are refused below twice {reserve}"
        ));
    }
    let frames = number(status, "/frames/dirty").zip(number(status, "/frames/bound"));
    if frames.is_some_and(|(dirty, bound)| dirty > bound / 2) {
        problems.push(
            "most of the memory waits to be written back: the disk is slower than the writers".to_owned(),
        );
    }
    let exports = status.pointer("/exports/rules").and_then(Value::as_array).into_iter().flatten();
    for export in exports.filter(|export| export.get("is_there").and_then(Value::as_bool) == Some(false)) {
        let path = text(export, "/path").unwrap_or("?");
        problems.push(format!("the exported directory {path} does not exist, and whom it is for is refused"));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_healthy_server_is_a_screenful() {
        let rxe0 = json!({
            "device": "rxe0", "port": 1, "link_layer": "Ethernet", "gid": "::ffff:10.9.0.1", "gid_index": 1, "path_mtu_bytes": 4096, "max_mtu_bytes": 4096,
            "state": "4: ACTIVE", "queue_pairs": 5, "pinned_bytes": 4096, "pinned_bound": 8192, "ending": 0, "ending_bound": 64,
        });
        let status = json!({
            "version": "0.1", "pid": 7, "uptime_seconds": 8000, "durability": "ack",
            "rnics": [
                {"device": "soft", "links": ["shm:///a", "tcp://b:1"], "network_security": "keys"},
                {"device": "rxe0", "links": ["rdma://c:1"], "network_security": "none", "hardware": rxe0},
            ],
            "page_window": {"kind": "odp", "shown_pages": 7, "shown_pages_bound": 9, "is_lost": false},
            "durable_rpc": {"kind": "S-RFlush", "synced": "before the answer"}, "pool": {"page_bytes": 4096, "pages": 1024, "free_pages": 512},
            "files": {"inodes": 3}, "frames": {"bytes": 8192, "bound": 2, "used": 1, "dirty": 0},
            "sessions": {"count": 2, "bound": 9, "listed": [{"label": "a:/mnt"}, {"label": "status"}]},
            "recovery": {"awaited_clients": 0, "data_waits": false, "locks_wait": false},
            "exports": {"count": 2, "rules": [
                {"for": ["key:a", "uid:7"], "path": "/b", "is_there": true, "read_only": true, "root_squash": "1:2", "all_squash": null,
                 "speaks_for_others": false},
                {"for": ["*"], "path": "/", "is_there": true, "read_only": false, "root_squash": null, "all_squash": "3:4", "speaks_for_others": null},
            ]},
            "pages": {"rotten": 0}, "connections": {"refused": 0},
            "scrub": {"last": null}, "rpc": {"lookup": 5},
            "metadata": {"room_bytes": 200, "reserve_bytes": 100, "reserve_bound": 100},
            "mount": {"mountpoint": "/mnt", "pid": 8, "unsynced_bytes": 0, "unsynced_files": 0},
        });
        let expected = "\
version     0.1, process 7, up 2 h
links       shm:///a tcp://b:1 (tcp: keys); rdma://c:1 (rdma: none)
RNIC        rxe0 port 1 (Ethernet), GID 1 ::ffff:10.9.0.1, path MTU 4096, 5 queue pairs, 4K pinned of 8K
page window odp, 7 pages shown of 9 at most
durability  ack
durable RPC S-RFlush, synced before the answer
space       2M of 4M free, 3 files and directories
memory      4K of 8K used, 0 of it not written back
clients     2 of 9 at most: a:/mnt status
exports     /b for key:a uid:7, read_only, root_squash 1:2, speaks_for_others false
            / for *, all_squash 3:4
recovery    done
mount       /mnt, process 8
unsynced    nothing
problems    none known
";
        assert_eq!(summary(&status), expected);
        assert_eq!(summary(&json!({})), "problems    none known\n");
        let hidden = summary(&json!({"exports": {"count": 3, "rules": null}}));
        assert!(
            hidden.starts_with("exports     3 (shown to who may have the whole pool as root)\n"),
            "{hidden}"
        );
        let rule = json!({"for": ["*"], "path": "/"});
        let many = summary(&json!({"exports": {"count": 10, "rules": vec![rule; 10]}}));
        assert!(many.contains("/ for *\n            and 2 more\n"), "{many}");
        let recovery = |clients: u64, data: bool| {
            summary(
                &json!({"recovery": {"awaited_clients": clients, "data_waits": data, "locks_wait": true}}),
            )
        };
        assert!(
            recovery(1, true).contains("1 client of the server before is awaited; files they changed wait")
        );
        assert!(recovery(2, false).contains("2 clients of the server before are awaited; new locks wait"));
    }

    #[test]
    fn each_problem_is_told() {
        for (status, words) in [
            (json!({"mount": {"server_is_away": true, "server_away_because": "gone"}}), "gone"),
            (
                json!({"mount": {"server_is_away": true, "server_away_because": "gone", "hardware": {
                    "state": "4: ACTIVE", "link_layer": "Ethernet", "path_mtu_bytes": 4096, "max_mtu_bytes": 4096,
                }}}),
                "gone; the path MTU is 4096 bytes, and each hop",
            ),
            (json!({"mount": {"error": "no process of yours"}}), "no process of yours"),
            (
                json!({"mount": {"unheard_because": "no answer", "unheard_seconds": 7}}),
                "no heartbeats for 7 s, and its locks end when it is not used for a lease: no answer",
            ),
            (
                json!({"mount": {"unheard_because": "no answer", "unheard_seconds": 20, "lease_seconds": 20}}),
                "no heartbeats for 20 s, and its locks end when it is not used for the lease of 20 s: no answer",
            ),
            (
                json!({"mount": {"unheard_because": "no answer", "unheard_seconds": 21, "lease_seconds": 20}}),
                "for 21 s, longer than the lease of 20 s: its locks have ended, unless programs used it all the time: no answer",
            ),
            (
                json!({"mount": {"server_is_away": true, "server_away_because": "gone", "server_away_seconds": 21, "lease_seconds": 20}}),
                "away for 21 s; if it was not down itself, this mount's locks have ended with the lease of 20 s: gone",
            ),
            (
                json!({"trust_clients": true, "pages": {"rotten": 1}}),
                "trust       every client may read every file",
            ),
            (
                json!({"mount": {"server_is_away": true, "unsynced_files": 1, "unsynced_bytes": 5}}),
                "5 unsynced bytes in 1 file that are lost if this mount ends",
            ),
            (
                json!({"server_error": "no answer", "mount": {"unsynced_files": 1, "unsynced_bytes": 5}}),
                "1 file that are lost if this mount ends",
            ),
            (json!({"server_error": "no answer"}), "the server does not answer: no answer"),
            (json!({"mount": {"death": "the process has died"}}), "problems    the process has died"),
            (
                json!({"mount": {"hardware": {"device": "rxe0", "port": 1, "state": "1: DOWN"}}}),
                "port 1 of rxe0, the RNIC of this mount, is not active (1: DOWN)",
            ),
            (
                json!({"rnics": [{"hardware": {"device": "rxe0", "ending": 64, "ending_bound": 64}}]}),
                "64 connections of the server by rxe0 that are over",
            ),
            (json!({"page_window": {"kind": "odp", "is_lost": true}}), "restart the server"),
            (
                json!({"rnics": [{"hardware": {"device": "rxe0", "path_mtu_bytes": 1024, "max_mtu_bytes": 4096}}]}),
                "the path MTU of rxe0, the RNIC of the server, is 1024 and could be 4096",
            ),
            (json!({"pages": {"rotten": 1}}), "1 reads met pages that do not match"),
            (json!({"pages": {"write_errors": 2}}), "2 writes to a disk"),
            (json!({"scrub": {"last": {"rotten": 3}}}), "last scrub"),
            (json!({"files": {"closed": 1}}), "1 files are closed until"),
            (json!({"connections": {"refused": 4}}), "4 connections"),
            (json!({"metadata": {"failures": 1}}), "changes may be refused"),
            (json!({"pool": {"free_pages": 9, "pages": 100}}), "nearly full"),
            (json!({"metadata": {"room_bytes": 199, "reserve_bound": 100}}), "meta/ is nearly full"),
            // What was held back is used up, too.
            (
                json!({"metadata": {"room_bytes": 0, "reserve_bytes": 0, "reserve_bound": 100}}),
                "meta/ is nearly full",
            ),
            (json!({"frames": {"dirty": 6, "bound": 10}}), "slower than the writers"),
            (json!({"exports": {"rules": [{"path": "/later", "is_there": false}]}}), "/later"),
        ] {
            let said = summary(&status);
            assert!(said.contains(words) && !said.contains("none known"), "{status}: {said}");
        }
        let gone = json!({"server_error": "no answer", "mount": {"server_is_away": true, "server_away_because": "gone"}});
        assert!(!summary(&gone).contains("no answer"), "the server's failure is told once");
        let advice = "connect: no answer; take the device away; call somebody";
        let twice = summary(&json!({"server_error": advice, "mount": {"unheard_because": advice}}));
        assert_eq!(
            (twice.matches("no answer").count(), twice.matches("call somebody").count()),
            (2, 1),
            "{twice}"
        );
        let unsynced = json!({"mount": {"unsynced_files": 1, "unsynced_bytes": 5}});
        assert!(summary(&unsynced).contains("in 1 file; only this mount has them"));
        let two = summary(&json!({"pages": {"rotten": 1, "read_errors": 2}}));
        assert!(two.ends_with("problems    1 reads met pages that do not match their checksums\n            2 reads of a disk have failed\n"), "{two}");
    }
}
