//! Log lines and readiness reasons about workers that are lost, drain or must not join.

use super::fake::*;
use std::{fs::File, sync::Arc};
use tandem_proto::v1::{FailureReason, worker_info::Role};
use tandem_router::{PrefillPlace, RouterSettings};
use tonic::Status;
use tracing::{Level, subscriber::DefaultGuard};

/// Writes the log of this thread, on which a test and all its tasks run, to the file.
fn log_to(file: &tempfile::NamedTempFile) -> DefaultGuard {
    let writer = Arc::new(File::create(file.path()).expect("the file is writable"));
    let lines = tracing_subscriber::fmt().with_ansi(false).with_max_level(Level::INFO).with_writer(writer);
    tracing::subscriber::set_default(lines.finish())
}

#[tokio::test]
async fn lost_worker_is_logged_as_a_warning_and_a_draining_worker_as_information() {
    for (end, level, words) in [
        (
            Status::unavailable("the engine hangs"),
            "WARN",
            "worker lost: the remote process answered with an error: the engine hangs;",
        ),
        (FailureReason::Draining.refusal("the worker is draining"), "INFO", "worker drains: it finishes its requests"),
    ] {
        let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
        let _log = log_to(&file);
        let mut decode = FakeWorker::start(Role::Decode, "d").await;
        let router = TestRouter::start(&[&decode], RouterSettings::default()).await;
        let watch = decode.join().await;
        router.until_indexed("d", 0).await;
        watch.fail(end);
        router.until_left("d").await;
        decode.watched().await;
        let text = std::fs::read_to_string(file.path()).expect("the file exists");
        let lines: Vec<&str> = text.lines().filter(|line| line.contains(&decode.address) && !line.contains("joined")).collect();
        let [line] = lines[..] else { panic!("one line is expected: {text}") };
        assert!(line.contains(level) && line.contains(words) && line.contains("worker_id=\"d\""), "{line}");
    }
}

#[tokio::test]
async fn readiness_reports_and_refused_worker_receives_why_the_worker_cannot_join() {
    let (mut decode, mut prefill) = (FakeWorker::start(Role::Decode, "d").await, FakeWorker::start(Role::Prefill, "p").await);
    let settings = RouterSettings { prefill: PrefillPlace::Auto, ..RouterSettings::default() };
    let unreachable = "127.0.0.1:1".to_owned();
    let workers = [&decode.address, &prefill.address, &unreachable].into_iter().cloned().collect();
    decode.describe_as(|info| info.block_size = 2 * BLOCK);
    let router = TestRouter::start_with(RouterSettings { workers, ..settings }).await;
    let early = decode.watched().await;
    let _prefill = prefill.join().await;
    router.until_indexed("p", 0).await;
    early.snapshot(0, &[]);
    early.abandoned().await;
    let reason = format!("{}: the worker cannot join the cluster: ", decode.address);
    let view = router.until(|view| view.unavailable_reason.as_ref().is_some_and(|why| why.contains(&reason))).await;
    let found = view.unavailable_reason.expect("no decode worker has joined");
    assert!(found.starts_with("no decode worker has joined") && found.contains("block size"), "{found}");
    let at = |text: &str| found.find(text).unwrap_or_else(|| panic!("{text} is not in {found}"));
    assert!(at(&reason) < at(&unreachable), "the refused worker comes first: {found}");
    let reason = decode.refused().await;
    assert!(reason.contains("block size"), "{reason}");
}
