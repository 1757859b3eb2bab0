use super::super::run::tests::{Site, counting};
use super::*;
use crate::rdma::chain::{Assembler, Bytes, FIRST_ADDRESS, Field, Label};

fn site() -> Site {
    Site::new(&counting(), 4)
}

#[test]
fn a_good_chain_is_proven_and_listed() {
    let site = site();
    assert_eq!(check(&site.queue), Ok(()));
    let text = super::super::disassemble::listing(&site.queue, 1, 5);
    let expected = "\
receive 0: 2.Address+0[8] 4.Immediate+0[4] 4.Address+0[12] 10.Index+0[4] 11.Index+0[4] queue+0x0[4]
0: WAIT 1
1: ENABLE 7
2: MASKED_FAA table+null[8] += 1 (fields to 0x8000) -> queue+0x1140[8]
3: READ queue+0x1140[8] -> queue+0x114f[1] queue+0x114e[1] queue+0x114d[1] queue+0x114c[1] queue+0x114b[1] queue+0x114a[1] queue+0x1149[1] queue+0x1148[1]
4: WRITE_IMM 0x00000000 queue+0x1148[8] -> peer 0x00000000@0x0[8] (last)
";
    assert_eq!(text, expected);
}

#[test]
fn an_entry_that_reaches_outside_is_not_proven() {
    let site = site();
    let read = site.entry(3);
    site.put(3, &Entry { address: FIRST_ADDRESS + 1_000_000, ..read });
    assert!(matches!(check(&site.queue), Err(Unproven::Range("entry", 3, NotInView::Range { .. }))));
    site.put(3, &Entry { key: 7, ..read });
    assert_eq!(check(&site.queue), Err(Unproven::Range("entry", 3, NotInView::Key(7))));
    site.put(3, &read);
    // The address is filled in, but the key is fixed: it must name a view that may be changed.
    let add = site.entry(2);
    site.put(2, &Entry { key: 7, ..add });
    assert_eq!(check(&site.queue), Err(Unproven::Range("entry", 2, NotInView::Key(7))));
    site.put(2, &Entry { key: site.queue.key, ..add });
    assert!(matches!(check(&site.queue), Err(Unproven::Writes("entry", 2, ..))));
}

#[test]
fn opcodes_keys_and_lengths_may_not_be_written() {
    for field_at in [0u64, 2, 24, 32, 48, 64, 76] {
        let site = site();
        let address = FIRST_ADDRESS + site.assembled.geometry.entries_at() + 4 * ENTRY_LEN as u64 + field_at;
        let read = site.entry(3);
        // Eight bytes that are no whole field, or no field at all.
        let element = Element { len: 8, key: site.queue.key, address };
        site.put(3, &Entry { address: FIRST_ADDRESS + 0x1140, ..read }.with_local(&[element]));
        assert!(matches!(check(&site.queue), Err(Unproven::Writes("entry", 3, ..))), "{field_at}");
    }
}

#[test]
fn a_place_begins_with_its_wait_and_is_short() {
    let site = site();
    site.put(0, &Entry::default());
    assert_eq!(check(&site.queue), Err(Unproven::Wait(0)));
    let mut a = Assembler::new(site.queue.key);
    a.wait();
    a.enable();
    let bytes = a.scratch(8);
    for _ in 0..STEPS_MAX {
        a.write(bytes, &[]);
    }
    let long = Site::new(&a, 2);
    assert_eq!(check(&long.queue), Err(Unproven::Steps(0, STEPS_MAX + 2)));
}

#[test]
fn enables_reach_the_next_one_and_no_further() {
    let site = site();
    let enable = site.entry(1);
    for index in [6, 8, 12] {
        site.put(1, &Entry { index, ..enable });
        assert_eq!(check(&site.queue), Err(Unproven::Enable(1, index)));
    }
    site.put(1, &enable);
    let far = WorkQueue { enabled: 3, ..site.queue.clone() };
    assert_eq!(check(&far), Err(Unproven::Enable(0, 3)));
}

#[test]
fn an_entry_that_is_changed_stands_behind_an_enable() {
    let with = |enabled: bool| {
        let mut a = Assembler::new(1);
        let word = a.scratch(8);
        a.wait();
        a.enable();
        let target = Label(if enabled { 4 } else { 3 });
        a.turn(word, target, Field::Address);
        if enabled {
            a.enable();
        }
        a.read(Bytes::Filled { key: 2 }, &[word]);
        check(&Site::new(&a, 2).queue)
    };
    assert_eq!(with(true), Ok(()));
    assert_eq!(with(false), Err(Unproven::Fetched(2, 3)));
}

#[test]
fn a_write_to_the_queue_fills_what_it_writes() {
    let with = |enabled: bool, key: u32| {
        let mut a = Assembler::new(1);
        let words = [a.scratch(8), a.scratch(8)];
        a.wait();
        a.enable();
        let target = Label(if enabled { 4 } else { 3 });
        a.write(Bytes::Of(target, Field::Address), &[words[0]]);
        if enabled {
            a.enable();
        }
        let to = if key == 1 { words[1] } else { Bytes::At { key, address: FIRST_ADDRESS, len: 8 } };
        a.write(to, &[words[1]]);
        check(&Site::new(&a, 2).queue)
    };
    assert_eq!(with(true, 2), Ok(()), "wherever that is in the table");
    assert_eq!(with(false, 2), Err(Unproven::Fetched(2, 3)));
    let refused = with(true, 1);
    assert!(
        matches!(refused, Err(Unproven::Writes("entry", 4, ..))),
        "it could lie in the queue: {refused:?}"
    );
}
