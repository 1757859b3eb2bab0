//! Inode numbers that the hostile users learn before files are closed to them. A number stays valid for the user who looked it up, so from then on
//! only the file's mode and the user's filekeys keep that user from the file.

use crate::asking::Asking;
use crate::dice::Dice;
use crate::grammar::Notable;
use crate::oracle::Oracle;
use crate::site::{STRANGERS, Site};
use crate::victim::look_up;
use cuttlefs_common::rpc::{Request, SessionSecret};

/// Names in the root. `secret` in `closed` is looked up too.
const NAMES: [&[u8]; 7] = [b"inbox", b"notice", b"shut", b"victim", b"counter", b"open", b"closed"];

/// Looks up every name as each hostile user; returns the numbers by user.
pub fn learn(site: &Site, dice: &Dice) -> Notable {
    let learn_as = |uid| {
        let mut oracle = Oracle::new(Vec::new());
        let mut scout = Asking::connect(&site.unix(), uid, &mut oracle);
        let attached = scout.attach(SessionSecret(dice.array()), 1, &mut oracle).expect("attached");
        let mut traces = 2..;
        let mut find = |parent, name: &[u8]| {
            let trace = traces.next().expect("there are always more");
            look_up(&mut scout, parent, name, trace, &mut oracle)
        };
        let mut found: Vec<_> = NAMES.iter().map(|name| find(attached.root, name)).collect();
        let closed = *found.last().expect("it is the last");
        found.push(find(closed, b"secret"));
        scout.ask(0, 1 << 20, &Request::Detach, &mut oracle, |_| ()).expect("it goes");
        (uid, found)
    };
    STRANGERS.into_iter().map(learn_as).collect()
}
