# Everything that must pass.
check:
    bash ci/test.sh

# The same without the release build and the model: for while you write.
quick:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo test --workspace

# A cluster on this machine.
up *flags:
    cargo run --release -- up {{flags}}
