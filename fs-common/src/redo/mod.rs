//! Redo records: the contents of the log, in a client's ring and in the server's segment alike (DESIGN section 5,
//! durable RPC section 4.2).

mod record;
/// A client's ring of them.
pub mod ring;

pub use record::{
    ALIGNMENT, HEADER_LEN, LogId, MAX_DATA_BYTES, OPERATOR_LEN, Record, RecordError, RecordKind, encode,
    encoded_len, parse,
};
