use super::*;

fn golden() -> (Entry, Vec<u8>) {
    let element = |len, key, address| Element { len, key, address };
    let entry = Entry {
        opcode: Opcode::MaskedAdd,
        last: true,
        imm: 0x0102_0304,
        index: 0x0506_0708,
        address: 0x1112_1314_1516_1718,
        key: 0x191a_1b1c,
        operand: 8,
        compare: 0x21,
        mask: 1 << 15,
        compare_mask: 0x22,
        ..Entry::default()
    }
    .with_local(&[element(3, 0x3132_3334, 0x4142_4344_4546_4748), element(5, 6, 7)]);
    let mut bytes = Vec::new();
    bytes.extend([0x15, 2, 2, 0]); // opcode, flags, elements
    bytes.extend([1, 2, 3, 4]); // immediate
    bytes.extend([5, 6, 7, 8]); // index
    bytes.extend([0; 4]);
    bytes.extend([0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]); // remote address
    bytes.extend([0x19, 0x1a, 0x1b, 0x1c]); // remote key
    bytes.extend([0; 4]);
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 8]); // operand
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0x21]); // compare
    bytes.extend([0, 0, 0, 0, 0, 0, 0x80, 0]); // mask
    bytes.extend([0, 0, 0, 0, 0, 0, 0, 0x22]); // compare mask
    bytes.extend([0, 0, 0, 3, 0x31, 0x32, 0x33, 0x34, 0x41, 0x42, 0x43, 0x44, 0x45, 0x46, 0x47, 0x48]);
    bytes.extend([0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 7]);
    bytes.resize(ENTRY_LEN, 0);
    (entry, bytes)
}

#[test]
fn an_entry_has_its_golden_bytes() {
    let (entry, bytes) = golden();
    assert_eq!(entry.encode().as_slice(), bytes);
    assert_eq!(Entry::parse(&entry.encode()), Ok(entry));
}

#[test]
fn a_receive_entry_has_its_golden_bytes() {
    let receive =
        ReceiveEntry::of(&[Element { len: 0x0102, key: 0x0304_0506, address: 0x0708_090a_0b0c_0d0e }]);
    let mut bytes = vec![0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14];
    bytes.resize(RECEIVE_LEN, 0);
    assert_eq!(receive.encode().as_slice(), bytes);
    assert_eq!(ReceiveEntry::parse(&receive.encode()), receive);
    assert_eq!(receive.elements().len(), 1);
}

#[test]
fn fields_lie_where_the_table_says() {
    let fields = [Field::Immediate, Field::Index, Field::Address, Field::Remote, Field::LocalAddress];
    let (entry, _) = golden();
    for field in fields {
        let (at, len) = field.range();
        let mut bytes = entry.encode();
        bytes[at..at + len].fill(0xee);
        let changed = Entry::parse(&bytes).expect("an entry");
        let expected = match field {
            Field::Immediate => Entry { imm: 0xeeee_eeee, ..entry },
            Field::Index => Entry { index: 0xeeee_eeee, ..entry },
            Field::Address => Entry { address: 0xeeee_eeee_eeee_eeee, ..entry },
            Field::Remote => Entry { address: 0xeeee_eeee_eeee_eeee, key: 0xeeee_eeee, ..entry },
            Field::LocalAddress => {
                let first = Element { address: 0xeeee_eeee_eeee_eeee, ..entry.local()[0] };
                entry.with_local(&[first, entry.local()[1]])
            }
        };
        assert_eq!(changed, expected);
    }
}

#[test]
fn what_is_no_entry_is_refused() {
    let (entry, _) = golden();
    let with = |at: usize, byte: u8| {
        let mut bytes = entry.encode();
        bytes[at] = byte;
        Entry::parse(&bytes)
    };
    assert_eq!(with(0, 0x0a), Err(BadEntry::Opcode(0x0a)));
    assert_eq!(with(1, 4), Err(BadEntry::Flags(4)));
    assert_eq!(with(1, 1), Err(BadEntry::Flags(1)), "no atomics of the peer's memory");
    assert_eq!(with(2, 9), Err(BadEntry::Elements(9)));
    for reserved in [3, 12, 15, 28, 31] {
        assert_eq!(with(reserved, 1), Err(BadEntry::Reserved));
    }
    let mut imm = Entry { opcode: Opcode::WriteImm, ..Entry::default() }.encode();
    assert_eq!(Entry::parse(&imm), Err(BadEntry::Flags(0)), "this side has no receive for it");
    imm[1] = 1;
    assert!(Entry::parse(&imm).is_ok());
}
