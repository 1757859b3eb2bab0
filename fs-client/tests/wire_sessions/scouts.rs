//! What hostile users know of files before anybody keeps them out: numbers that each of them looked up while he might. A number
//! stays good for who has it, so all that keeps him from such a file is what its mode and his filekeys give him.

use crate::asking::Asking;
use crate::dice::Dice;
use crate::grammar::Notable;
use crate::oracle::Oracle;
use crate::site::{STRANGERS, Site};
use crate::victim::look_up;
use cuttlefs_common::rpc::{Request, SessionSecret};

/// In the root, and in `closed`.
const NAMES: [&[u8]; 6] = [b"inbox", b"notice", b"shut", b"victim", b"open", b"closed"];

/// Looks everything up as each of them.
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
