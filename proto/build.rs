//! Compiles the .proto files with protox, a compiler written in Rust, so that `protoc` need not be installed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=tandem");
    println!("cargo:rerun-if-changed=envoy");
    let names = ["tandem/v1/router", "tandem/v1/worker", "tandem/v1/transfer", "envoy/ext_proc", "envoy/health"];
    let files = names.map(|name| format!("{name}.proto"));
    let descriptors = protox::compile(&files, ["."])?;
    tonic_prost_build::configure()
        .bytes(".tandem.v1.PushRequest.payload")
        .bytes(".tandem.v1.Image.data")
        .bytes(".envoy.service.ext_proc.v3")
        // These messages hold tickets, which must not be logged; `ticket.rs` prints their other fields.
        .skip_debug([".tandem.v1.Ticket", ".tandem.v1.PushRequest", ".tandem.v1.NcclControlRequest", ".tandem.v1.KvHandle"])
        .compile_fds(descriptors)?;
    Ok(())
}
