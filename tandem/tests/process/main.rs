//! The binary as a process of its own.

mod canary;
mod cluster;
mod command_line;
mod refusals;
mod roles;
mod up;
