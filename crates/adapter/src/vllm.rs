//! Support for a stock vLLM server as an engine.

mod client;
mod connect;
mod events;
mod handle;
mod metrics;
mod request;
mod response;
mod subscription;

pub use connect::{KvEvents, SharedStore, VllmSettings, connect, inspect};
pub use events::{EventBatch, MalformedBatch, decode};
pub use subscription::{EventLoss, InvalidEndpoint, MirrorUpdate, Subscription, SubscriptionSettings};
