//! The binary as a process of its own.

mod account;
mod canary;
mod cluster;
mod command_line;
mod etcd;
mod hostile;
mod key;
mod metrics;
mod overhead;
mod refusals;
mod roles;
mod routers;
mod talk;
mod top;
mod trace;
mod up;
