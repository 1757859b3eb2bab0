use super::*;
use std::collections::HashMap;

/// Pages in a map.
#[derive(Debug, Default)]
pub(in crate::swap) struct Map {
    pub(in crate::swap) pages: HashMap<u64, Bytes>,
    pub(in crate::swap) stores: usize,
    /// The most pages that it takes.
    pub(in crate::swap) room: Option<usize>,
}

impl Remote for Map {
    fn store(&mut self, pages: &[(u64, &Bytes)]) -> Result<(), RemoteError> {
        for (page, bytes) in pages {
            if !self.pages.contains_key(page) && self.room.is_some_and(|room| self.pages.len() >= room) {
                return Err(RemoteError::Empty);
            }
            self.pages.insert(*page, **bytes);
            self.stores += 1;
        }
        Ok(())
    }

    fn load(&mut self, page: u64) -> Result<Box<Bytes>, RemoteError> {
        self.pages.get(&page).map(|bytes| Box::new(*bytes)).ok_or(RemoteError::NotMapped(page))
    }

    fn is_stored(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    fn forget(&mut self, pages: &[u64]) -> Result<(), RemoteError> {
        self.pages.retain(|page, _| !pages.contains(page));
        Ok(())
    }
}

#[test]
fn a_page_that_two_count_on_is_not_overwritten() {
    let mut store = Store::new(Map::default(), 10);
    let (one, two) = ([1; PAGE], [2; PAGE]);
    let slot = store.save(&[(None, &one)]).expect("stored")[0];
    store.hold(slot);
    let other = store.save(&[(Some(slot), &two)]).expect("stored")[0];
    assert_ne!(slot, other);
    assert_eq!((*store.load(slot).expect("loaded"), *store.load(other).expect("loaded")), (one, two));
    // Now it is the only one's.
    let same = store.save(&[(Some(slot), &two)]).expect("stored")[0];
    assert_eq!(same, slot);
    assert_eq!(*store.load(slot).expect("loaded"), two);
}

#[test]
fn what_did_not_change_is_not_sent_and_what_changed_there_is_refused() {
    let mut store = Store::new(Map::default(), 10);
    let bytes = [7; PAGE];
    let slot = store.save(&[(None, &bytes)]).expect("stored")[0];
    assert_eq!(store.save(&[(Some(slot), &bytes)]).expect("stored"), [slot]);
    assert_eq!((store.remote.stores, store.figures().unchanged), (1, 1));
    store.remote.pages.get_mut(&slot.0).expect("there")[4095] ^= 1;
    assert!(matches!(store.load(slot), Err(StoreError::Wrong)));
}

#[test]
fn a_full_space_says_so_and_what_is_released_is_used_again() {
    let mut store = Store::new(Map::default(), 100);
    let bytes = [7; PAGE];
    let slots = store.save(&[(None, &bytes); 100]).expect("stored");
    let full = store.save(&[(None, &bytes)]).expect_err("full").to_string();
    assert!(full.contains("all 100 pages") && full.contains("--size"), "{full}");
    slots.iter().for_each(|slot| store.release(*slot));
    store.tidy().expect("tidy");
    assert!(store.remote.pages.is_empty());
    assert_eq!(store.save(&[(None, &bytes); 100]).expect("stored").len(), 100);
    assert_eq!(store.figures().most, 100);
}

#[test]
fn a_node_that_is_full_takes_pages_to_places_that_were_given_up() {
    let mut store = Store::new(Map { room: Some(6), ..Map::default() }, 100);
    let bytes = |byte: u8| [byte; PAGE];
    let old = store.save(&[(None, &bytes(1)), (None, &bytes(2)), (None, &bytes(3)), (None, &bytes(4))]);
    let old = old.expect("stored");
    // The first one is overwritten, two more find room, the last one does not.
    let leaving = [(Some(old[0]), &bytes(11)), (None, &bytes(5)), (None, &bytes(6)), (None, &bytes(7))];
    assert_eq!(store.lacking(&leaving), 0);
    let full = store.save(&leaving).expect_err("full").to_string();
    assert!(full.contains("no free page"), "{full}");
    // Those that were stored are still there, for whoever comes next.
    assert_eq!((store.lacking(&leaving), store.figures().stores), (1, 4));
    store.pass_on(old[3]);
    assert_eq!(store.lacking(&leaving), 0);
    let slots = store.save(&leaving).expect("stored");
    assert_eq!((slots[0], slots.contains(&old[3])), (old[0], true));
    for (slot, byte) in slots.iter().chain(&old[1..3]).zip([11, 5, 6, 7, 2, 3]) {
        assert_eq!(*store.load(*slot).expect("loaded"), bytes(byte));
    }
    let figures = store.figures();
    assert_eq!((figures.passed_on, figures.most, store.remote.pages.len()), (1, 6, 6));
    // Once it got pages back, it is asked for further ones again.
    store.remote.room = None;
    let more = store.save(&[(None, &bytes(8)); 64]).expect("stored");
    assert_eq!(store.lacking(&[(None, &bytes(9))]), 1);
    more.iter().for_each(|slot| store.release(*slot));
    store.tidy().expect("tidy");
    assert_eq!((store.lacking(&[(None, &bytes(9))]), store.remote.pages.len()), (0, 6));
    assert!((store.figures().requests_a_page() - (72.0 + 6.0 + 64.0) / 78.0).abs() < 1e-9);
}
