# Runs all checks that must pass before a change is merged.
check:
    bash ci/test.sh

# Runs fewer checks, while you write code: without the release build, and without the tests on the default model.
quick:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo test --workspace

# Starts a cluster on this machine.
up *flags:
    cargo run --release -- up {{flags}}
