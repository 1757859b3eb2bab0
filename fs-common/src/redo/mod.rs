//! Redo records: the contents of a client's ring (durable RPC section 4.2).

mod record;
/// A client's ring of records.
pub mod ring;

pub use record::{
    ALIGNMENT, HEADER_LEN, LogId, MAX_DATA_BYTES, OPERATOR_LEN, Record, RecordError, RecordKind, encode,
    encoded_len, parse,
};
