//! Tests of the binary, which runs as a separate process for each role.

mod account;
mod agreement;
mod api_keys;
mod bench;
mod canary;
mod chat;
mod cluster;
mod command_line;
mod etcd;
mod external;
mod hostile;
mod key;
mod liars;
mod logs;
mod metrics;
mod mtls;
mod overhead;
mod refusals;
mod restarts;
mod roles;
mod routers;
mod starting;
mod talk;
mod top;
mod trace;
mod up;
