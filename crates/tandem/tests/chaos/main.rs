//! Tests with faults of real processes under load: no answer may be lost or changed, usage must reconcile with the ledgers, and no block may leak.
//!
//! `cargo test --release -p tandem --test chaos` runs each scenario in a short form, with limits that hold on a busy machine. The figures of
//! docs/reliability.md come from the long forms, which need a machine that does nothing else: `cargo test --release -p tandem --test chaos --
//! --ignored --nocapture`. With `CHAOS_CERTIFICATES=1`, the processes of all scenarios have certificates.

mod churn;
#[path = "../process/cluster.rs"]
mod cluster;
mod faults;
mod idle;
mod load;
mod proxy;
mod reconcile;
mod requests;
mod rig;
mod services;
mod several;
mod table;
#[path = "../process/up.rs"]
mod up;

use parking_lot::{Mutex, MutexGuard};
use table::{Form, Row};

fn print_and_check(row: &Row) {
    table::print_text(&row.line());
    row.check(Form::Short);
}

#[test]
fn killed_decode_worker_loses_no_answer() {
    print_and_check(&faults::decode_killed());
}

#[test]
fn killed_prefill_worker_loses_no_answer() {
    print_and_check(&faults::prefill_killed());
}

#[test]
fn stopped_workers_lose_no_answer() {
    print_and_check(&faults::decode_stopped());
    print_and_check(&faults::prefill_stopped());
}

#[test]
fn repeated_worker_kills_and_client_disconnects_lose_no_answer() {
    let (row, memory) = churn::run(Form::Short);
    print_and_check(&row);
    memory.check(Form::Short);
}

#[test]
fn failure_of_any_process_in_a_cluster_with_etcd_and_nats_loses_no_answer() {
    several::run(Form::Short, rig::certificates(), |row| print_and_check(&row));
}

#[test]
fn failure_of_any_process_in_a_cluster_with_certificates_loses_no_answer() {
    several::run(Form::Short, true, |row| print_and_check(&row));
}

/// Locks out other tests that measure, so that they run one after another.
fn run_alone() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock()
}

/// Runs the scenarios in their long form and prints the tables of docs/reliability.md.
#[test]
#[ignore = "takes minutes and needs a machine that does nothing else"]
fn long_run_of_worker_faults_loses_no_answer() {
    let _alone = run_alone();
    let mut rows: Vec<Row> = [
        faults::decode_killed,
        faults::prefill_killed,
        faults::decode_stopped,
        faults::prefill_stopped,
        faults::decode_stopped_beyond_keep_alive,
        faults::prefill_stopped_beyond_keep_alive,
    ]
    .map(|scenario| scenario())
    .into();
    let (row, memory) = churn::run(Form::Long);
    rows.push(row);
    table::print(&rows);
    memory.print();
    rows.iter().for_each(|row| row.check(Form::Long));
    memory.check(Form::Long);
}

#[test]
#[ignore = "takes minutes and needs a machine that does nothing else"]
fn long_run_of_faults_in_a_cluster_with_etcd_and_nats_loses_no_answer() {
    let _alone = run_alone();
    let mut rows = Vec::new();
    several::run(Form::Long, rig::certificates(), |row| rows.push(row));
    table::print(&rows);
    rows.iter().for_each(|row| row.check(Form::Long));
}

#[test]
#[ignore = "takes minutes and needs a machine that does nothing else"]
fn idle_processes_use_few_resources() {
    let _alone = run_alone();
    idle::cluster();
    idle::router();
}
