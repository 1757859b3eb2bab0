//! Initiator translation under a model checker: `initiator::read`, as it is, beside everything that can befall a page
//! (fs-server, `pages::model`).

use super::initiator;
use super::layout::CachedLayout;
use crate::session::Windows;
use cuttlefs_common::ids::FilePage;
use cuttlefs_server::pages::model::{LEN, SLOT, Site, check_given_away, check_reader, check_scribble};

fn read(site: &Site) -> Option<[u8; LEN]> {
    let (frames, residency, files) = site.windows();
    let layout = CachedLayout::new(FilePage(0), Site::layout());
    let mut out = [0; LEN];
    let got = initiator::read(&Windows { frames, residency, files }, SLOT, &layout, 0, &mut out).ok()?;
    (got.valid_len == LEN && got.missing.is_empty()).then_some(out)
}

#[test]
fn an_initiator_s_read_is_never_mistaken() {
    check_reader(read);
}

#[test]
#[should_panic(expected = "read [")]
fn a_write_without_the_protocol_is_caught() {
    check_scribble(read);
}

#[test]
#[should_panic(expected = "read [")]
fn a_page_that_is_given_away_under_its_generation_is_caught() {
    check_given_away(read);
}
