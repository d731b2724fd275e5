//! The binary's parts: its command line, where models come from, and the whole cluster in one process.

pub mod model;
pub mod settings;
