//! Lists every place that starts a task or a thread, and what happens when the task panics or ends too early. If it ends without an error
//! in the log, its process looks healthy and does not work.

use std::{collections::BTreeMap, path::Path};
use tandem_tests::workspace::{crates, root, text};

/// What happens when a task or thread panics, or ends too early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It works for one request, connection, transfer or call, which fails with it.
    EndsItsRequest,
    /// It is started again (`tandem_process::supervise`, or a loop of its own).
    StartsAgain,
    /// The process ends with an error that names it.
    EndsTheProcess,
    /// The engine or worker to which it belongs ends. That ends the process, or the engine's instance starts again.
    EndsItsWorker,
    /// The work that it would have done is counted as lost, and logged.
    IsCounted,
    /// The place only starts tasks that other places in the list pass to it.
    Passes,
}

use Fate::*;

/// The files that start tasks or threads, with the number of places in each.
const STARTS: &[(&str, usize, Fate)] = &[
    ("crates/adapter/src/http.rs", 1, EndsItsRequest),
    ("crates/adapter/src/kv_events/subscription.rs", 1, EndsItsWorker),
    ("crates/adapter/src/sglang/client.rs", 1, EndsItsRequest),
    ("crates/devices/src/cpu/threads.rs", 1, EndsItsWorker),
    ("crates/devices/src/cuda/pool.rs", 1, EndsItsWorker),
    ("crates/engine/src/handle.rs", 1, EndsItsWorker),
    ("crates/engine/src/handle/constraints.rs", 3, EndsItsRequest),
    ("crates/engine/src/sampling/masks.rs", 1, EndsItsRequest),
    ("frontend/src/audit.rs", 1, EndsItsRequest),
    ("frontend/src/cores.rs", 1, EndsItsRequest),
    ("frontend/src/http/starting.rs", 1, EndsItsRequest),
    ("crates/grammar/src/stack.rs", 1, EndsItsRequest),
    ("crates/load/src/dispatch.rs", 2, EndsItsRequest),
    ("crates/load/src/replay.rs", 1, EndsItsRequest),
    ("crates/process/src/discovery/watch.rs", 1, StartsAgain),
    ("crates/process/src/line_file.rs", 1, IsCounted),
    ("crates/process/src/listen/mod.rs", 2, EndsItsRequest),
    ("crates/process/src/shutdown.rs", 4, Passes),
    ("crates/process/src/telemetry.rs", 1, IsCounted),
    ("crates/process/src/watched_file.rs", 1, EndsTheProcess),
    ("proto/src/channel/tls.rs", 1, EndsItsRequest),
    ("router/src/lib.rs", 1, StartsAgain),
    ("crates/simulator/src/trace.rs", 1, EndsItsRequest),
    ("crates/tandem/src/chat/answer.rs", 1, EndsItsRequest),
    ("crates/tandem/src/cluster/external.rs", 2, StartsAgain),
    ("crates/tandem/src/cluster/mod.rs", 1, EndsItsRequest),
    ("crates/tandem/src/cluster/parts.rs", 6, EndsTheProcess),
    ("crates/tandem/src/cluster/process.rs", 3, EndsTheProcess),
    ("crates/tandem/src/cluster/weights.rs", 1, EndsTheProcess),
    ("crates/model-store/src/pypi.rs", 3, EndsItsRequest),
    ("crates/transfer/src/blocking.rs", 2, EndsItsRequest),
    ("crates/transfer/src/nccl/receiver.rs", 3, EndsItsRequest),
    ("crates/transfer/src/nccl/sender.rs", 3, EndsItsRequest),
    ("crates/worker/src/requests.rs", 2, EndsItsRequest),
    ("crates/worker/src/scheduled.rs", 1, EndsItsRequest),
];

/// Returns the lines of a file's product code that start a task or a thread.
fn starts(path: &Path) -> usize {
    let text = text(path);
    let product = text.split("#[cfg(test)]\n").next().unwrap_or_default();
    let code = product.lines().map(|line| line.split("//").next().unwrap_or_default());
    let calls = ["spawn(", "spawn_on(", "spawn_blocking(", "spawn_scoped(", "spawn_local(", ".track("];
    code.filter(|line| !line.contains("fn ") && calls.iter().any(|call| line.contains(call))).count()
}

fn find(dir: &Path, found: &mut BTreeMap<String, usize>) {
    for entry in std::fs::read_dir(dir).expect("source folders are readable").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() {
            if name != "tests" {
                find(&path, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let count = starts(&path);
            if count > 0 {
                let name = path.strip_prefix(root()).expect("the file is in the workspace").to_string_lossy().into_owned();
                found.insert(name, count);
            }
        }
    }
}

#[test]
fn every_task_that_outlives_a_request_is_supervised() {
    let mut found = BTreeMap::new();
    for folder in crates().iter().filter(|folder| !folder.ends_with("tests")) {
        find(&folder.join("src"), &mut found);
    }
    let listed: BTreeMap<String, usize> = STARTS.iter().map(|(file, count, _)| ((*file).to_owned(), *count)).collect();
    assert_eq!(found, listed, "add each new place to STARTS, with what happens when its task panics or ends too early");
}
