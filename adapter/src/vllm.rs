//! A stock vLLM server as an engine.

mod events;
mod subscription;

pub use events::{Batch, MalformedBatch, decode};
pub use subscription::{InvalidEndpoint, Lost, Subscription, SubscriptionSettings, Update};
