//! Server-sent events.

use serde::Serialize;

/// A comment. The specification of server-sent events recommends comments so that proxies do not close idle connections.
pub const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// The event that ends a stream in OpenAI's order.
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";

/// Writes an event with a name.
pub(super) fn write_named(out: &mut Vec<u8>, name: &str, data: &impl Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    write_event(out, data);
}

/// Writes an event without a name.
pub(super) fn write_event(out: &mut Vec<u8>, data: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    write_json(out, data);
    out.extend_from_slice(b"\n\n");
}

/// Writes the body of an answer that is not streamed.
pub(super) fn write_json(out: &mut Vec<u8>, data: &impl Serialize) {
    serde_json::to_writer(out, data).expect("the keys of an answer are strings");
}
