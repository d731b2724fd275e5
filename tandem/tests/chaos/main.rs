//! Faults of real processes under load: no answer is lost or changed, every book agrees, nothing leaks.
//!
//! `cargo test --release -p tandem --test chaos` plays each story in a short form and holds it to bounds that a busy machine
//! keeps. The figures of docs/reliability.md come from the long forms, one after the other on a quiet machine:
//! `cargo test --release -p tandem --test chaos -- --ignored --nocapture`.

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

fn hold(row: &Row) {
    table::print_line(&row.line());
    row.hold(Form::Short);
}

#[test]
fn killed_decode_worker_loses_no_answer() {
    hold(&faults::decode_killed());
}

#[test]
fn killed_prefill_worker_loses_no_answer() {
    hold(&faults::prefill_killed());
}

#[test]
fn stopped_workers_lose_no_answer() {
    hold(&faults::decode_stopped());
    hold(&faults::prefill_stopped());
}

#[test]
fn churn_of_workers_and_clients_loses_no_answer() {
    let (row, memory) = churn::play(Form::Short);
    hold(&row);
    memory.hold(Form::Short);
}

#[test]
fn failure_of_any_part_with_etcd_and_nats_loses_no_answer() {
    several::play(Form::Short, |row| hold(&row));
}

/// Figures are taken one after the other, on a machine that does nothing else.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}

/// All stories in their long form; prints what docs/reliability.md shows.
#[test]
#[ignore = "minutes, and a quiet machine"]
fn figures_of_workers() {
    let _alone = alone();
    let mut rows: Vec<Row> = [
        faults::decode_killed,
        faults::prefill_killed,
        faults::decode_stopped,
        faults::prefill_stopped,
        faults::decode_stopped_for_long,
        faults::prefill_stopped_for_long,
    ]
    .map(|story| story())
    .into();
    let (row, memory) = churn::play(Form::Long);
    rows.push(row);
    table::print(&rows);
    memory.print();
    rows.iter().for_each(|row| row.hold(Form::Long));
    memory.hold(Form::Long);
}

#[test]
#[ignore = "minutes, and a quiet machine"]
fn figures_with_etcd_and_nats() {
    let _alone = alone();
    let mut rows = Vec::new();
    several::play(Form::Long, |row| rows.push(row));
    table::print(&rows);
    rows.iter().for_each(|row| row.hold(Form::Long));
}

#[test]
#[ignore = "minutes, and a quiet machine"]
fn figures_of_idle_processes() {
    let _alone = alone();
    idle::cluster();
    idle::router();
}
