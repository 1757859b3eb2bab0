//! The page protocol's own code under a model checker, with both translators: the target's, as the NIC engine reads, and the initiator's
//! (fs-server, `pages::model`). Needs the feature `model-check`, with which nothing but this works; [docs/testing.md] has the command.

use cuttlefs_client::model::read_as_initiator;
use cuttlefs_server::pages::model::{
    LEN, Reader, SLOT, Site, check_given_away, check_reader, check_scribble,
};

fn initiator(site: &Site) -> Option<[u8; LEN]> {
    let (frames, residency, files) = site.windows();
    let mut out = [0; LEN];
    read_as_initiator(frames, residency, files, SLOT, Site::layout(), &mut out).then_some(out)
}

const TARGET: Reader = Site::read_as_target;

#[test]
fn a_target_s_read_is_never_mistaken() {
    check_reader(TARGET);
}

#[test]
fn an_initiator_s_read_is_never_mistaken() {
    check_reader(initiator);
}

/// The model can fail: without the odd version in between, the checker finds the torn copy.
#[test]
#[should_panic(expected = "read [")]
fn a_write_without_the_protocol_is_caught_by_a_target() {
    check_scribble(TARGET);
}

#[test]
#[should_panic(expected = "read [")]
fn a_write_without_the_protocol_is_caught_by_an_initiator() {
    check_scribble(initiator);
}

/// And so it can with reuse: a page that is given away while the mapping and the generation still name it.
#[test]
#[should_panic(expected = "read [")]
fn a_page_given_away_under_its_mapping_is_caught_by_a_target() {
    check_given_away(TARGET);
}

#[test]
#[should_panic(expected = "read [")]
fn a_page_given_away_under_its_generation_is_caught_by_an_initiator() {
    check_given_away(initiator);
}
