//! The code of the page protocol under a model checker, with all three ways to translate: by the target, as the NIC engine reads; by the initiator
//! with loads; and by the initiator with READs (fs-server, `pages::model`). The tests need the feature `model-check`, with which no other test works;
//! [docs/testing.md] has the command.

use cuttlefs_client::model::{RemoteReader, read_as_initiator};
use cuttlefs_common::rpc::Layout;
use cuttlefs_server::pages::model::{
    LEN, PREEMPTIONS, Reader, SLOT, Site, check_given_away, check_growth, check_reader, check_scribble,
};

fn with_loads(site: &Site, layout: Layout, out: &mut [u8]) -> bool {
    let (frames, residency, files) = site.windows();
    read_as_initiator(frames, residency, files, SLOT, layout, out)
}

fn initiator(site: &Site) -> Option<[u8; LEN]> {
    let mut out = [0; LEN];
    with_loads(site, Site::layout(), &mut out).then_some(out)
}

fn with_reads(reader: &RemoteReader, site: &Site, layout: Layout, out: &mut [u8]) -> bool {
    let (frames, residency, files) = site.windows();
    reader.read([frames, residency.memory().clone(), files.memory().clone()], SLOT, layout, out)
}

/// A reader that knows no frames: one look for the entry, and one for the bytes.
fn remote(site: &Site) -> Option<[u8; LEN]> {
    let mut out = [0; LEN];
    with_reads(&RemoteReader::default(), site, Site::layout(), &mut out).then_some(out)
}

/// A reader that knows the entry: one look.
fn remote_knowing(site: &Site) -> Option<[u8; LEN]> {
    let mut out = [0; LEN];
    let (_, residency, _) = site.windows();
    with_reads(&RemoteReader::knowing(&residency, Site::layout()), site, Site::layout(), &mut out)
        .then_some(out)
}

const TARGET: Reader = Site::read_as_target;

#[test]
fn a_target_s_read_is_never_mistaken() {
    check_reader(TARGET, PREEMPTIONS);
}

#[test]
fn an_initiator_s_read_is_never_mistaken() {
    check_reader(initiator, PREEMPTIONS);
}

/// A remote initiator's read has twice as many loads, so fewer preemptions are tried.
#[test]
fn a_remote_initiator_s_first_read_is_never_mistaken() {
    check_reader(remote, PREEMPTIONS - 2);
}

/// This read looks at the entry once more, and its bytes come with the first look: with one more preemption the test would take minutes.
#[test]
fn a_remote_initiator_s_read_by_a_known_entry_is_never_mistaken() {
    check_reader(remote_knowing, PREEMPTIONS - 3);
}

#[test]
fn a_file_that_grows_is_not_read_as_zeros() {
    check_growth(|site| with_loads(site, Site::empty_layout(), &mut [0; LEN]), Site::grow);
    check_growth(
        |site| with_reads(&RemoteReader::default(), site, Site::empty_layout(), &mut [0; LEN]),
        Site::grow,
    );
}

#[test]
#[should_panic(expected = "zeros were read")]
fn a_length_that_is_shown_before_its_layout_is_caught() {
    check_growth(|site| with_loads(site, Site::empty_layout(), &mut [0; LEN]), Site::grow_carelessly);
}

/// Shows that the model can fail: without the odd version in between, the checker finds the torn copy.
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

/// Shows that the model can fail for reuse: the checker finds a page that is given away while the mapping and the generation still name it.
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

#[test]
#[should_panic(expected = "read [")]
fn a_write_without_the_protocol_is_caught_by_a_remote_initiator() {
    check_scribble(remote);
}

#[test]
#[should_panic(expected = "read [")]
fn a_page_given_away_under_its_generation_is_caught_by_a_remote_initiator() {
    check_given_away(remote);
}
