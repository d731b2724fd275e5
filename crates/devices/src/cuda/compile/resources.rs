//! Checks the machine code of every kernel with NVIDIA's `cuobjdump` and `nvdisasm`, which need no GPU: registers, local memory, occupancy,
//! and the instructions on which a kernel's speed depends.

use super::{
    compile,
    tests::{QWEN3_8B, nvrtc_is_present},
};
use crate::cuda::{device::Kernel, shape::Shape};
use std::{collections::BTreeMap, fs, io::Write, path::Path, process::Command};

/// The limits of one multiprocessor, from the table "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide.
struct Multiprocessor {
    architecture: &'static str,
    registers: usize,
    threads: usize,
    blocks: usize,
    shared_bytes: usize,
    /// The bytes of a thread block's shared memory that the driver uses itself and that `cuobjdump` includes in the kernel's number.
    listed_bytes: usize,
}

const MULTIPROCESSORS: [Multiprocessor; 3] = [
    Multiprocessor {
        architecture: "sm_80",
        registers: 65_536,
        threads: 2_048,
        blocks: 32,
        shared_bytes: 164 << 10,
        listed_bytes: 0,
    },
    Multiprocessor {
        architecture: "sm_90a",
        registers: 65_536,
        threads: 2_048,
        blocks: 32,
        shared_bytes: 228 << 10,
        listed_bytes: 1 << 10,
    },
    Multiprocessor {
        architecture: "sm_100",
        registers: 65_536,
        threads: 2_048,
        blocks: 32,
        shared_bytes: 228 << 10,
        listed_bytes: 1 << 10,
    },
];
/// The number of registers in one unit. A warp receives a whole number of units.
const REGISTER_UNIT: usize = 256;
/// The bytes of shared memory that the driver uses itself in every thread block.
const RESERVED_SHARED_BYTES: usize = 1 << 10;

impl Multiprocessor {
    /// Returns the number of thread blocks that run at a time.
    fn occupancy(&self, kernel: Kernel, registers: usize, shared_bytes: usize) -> usize {
        let threads = kernel.threads() as usize;
        let registers = (registers * 32).next_multiple_of(REGISTER_UNIT) * threads / 32;
        let shared_bytes = shared_bytes + RESERVED_SHARED_BYTES;
        [self.blocks, self.threads / threads, self.registers / registers, self.shared_bytes / shared_bytes]
            .into_iter()
            .min()
            .unwrap_or(0)
    }
}

/// Returns the output of one of NVIDIA's tools; `None` if the tool is not installed.
fn output_of(tool: &str, arguments: &[&str], file: &Path) -> Option<String> {
    let folder = std::env::var_os("TANDEM_CUDA_TOOLS")?;
    let run = Command::new(Path::new(&folder).join(tool)).args(arguments).arg(file).output();
    let run = run.expect("TANDEM_CUDA_TOOLS is the folder of cuobjdump and nvdisasm");
    assert!(run.status.success(), "{tool}: {}", String::from_utf8_lossy(&run.stderr));
    Some(String::from_utf8(run.stdout).expect("the tool prints text"))
}

/// Returns the numbers that `cuobjdump --dump-resource-usage` prints for each kernel, by name.
fn resources(listing: &str) -> BTreeMap<&str, BTreeMap<&str, usize>> {
    let mut lines = listing.lines().map(str::trim);
    let mut all = BTreeMap::new();
    while let Some(line) = lines.next() {
        let Some(kernel) = line.strip_prefix("Function ").and_then(|line| line.strip_suffix(':')) else { continue };
        let numbers = lines.next().into_iter().flat_map(str::split_whitespace);
        let numbers = numbers.filter_map(|entry| entry.split_once(':')).filter_map(|(name, n)| Some((name, n.parse().ok()?)));
        all.insert(kernel, numbers.collect());
    }
    all
}

/// Returns how often each opcode, without its suffixes, occurs in each kernel that `nvdisasm` lists.
fn opcodes(listing: &str) -> BTreeMap<&str, BTreeMap<&str, usize>> {
    let mut all: BTreeMap<&str, BTreeMap<&str, usize>> = BTreeMap::new();
    let mut kernel = "";
    for line in listing.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix(".text.").and_then(|line| line.strip_suffix(':')) {
            kernel = name;
        }
        let Some(code) = line.strip_prefix("/*").and_then(|line| line.split_once("*/")).map(|(_, code)| code) else { continue };
        let opcode = code.split_whitespace().find(|word| !word.starts_with('@') && !word.starts_with('{'));
        let opcode = opcode.and_then(|word| word.trim_end_matches(';').split('.').next()).unwrap_or_default();
        if !opcode.is_empty() {
            *all.entry(kernel).or_default().entry(opcode).or_default() += 1;
        }
    }
    all
}

fn dynamic_shared_bytes(shape: &Shape, kernel: Kernel) -> usize {
    match kernel {
        Kernel::AttendPrompt => shape.prompt_bytes(),
        Kernel::AttendToken => shape.token_bytes(),
        _ => 0,
    }
}

/// The table in docs/bench/gpu.md is this test's output.
#[test]
fn no_kernel_uses_local_memory_on_any_architecture() {
    if !nvrtc_is_present() || std::env::var_os("TANDEM_CUDA_TOOLS").is_none() {
        let skipped = "SKIPPED: no NVRTC or no cuobjdump and nvdisasm; ci/test.sh fetches them (its part `nvrtc`)";
        writeln!(std::io::stderr(), "{skipped}").unwrap();
        return;
    }
    let shape = QWEN3_8B;
    let folder = tempfile::tempdir().unwrap();
    let (mut wrong, mut table) = (Vec::new(), Vec::new());
    for processor in &MULTIPROCESSORS {
        let file = folder.path().join(format!("{}.cubin", processor.architecture));
        fs::write(&file, compile(&shape, processor.architecture).unwrap()).unwrap();
        let used = output_of("cuobjdump", &["--dump-resource-usage"], &file).unwrap();
        let code = output_of("nvdisasm", &["--print-code"], &file).unwrap();
        let (used, code) = (resources(&used), opcodes(&code));
        for kernel in Kernel::ALL {
            let (used, code) = (&used[kernel.name()], &code[kernel.name()]);
            let count = |names: &[&str]| names.iter().map(|name| code.get(name).copied().unwrap_or(0)).sum::<usize>();
            let (registers, stack, local) = (used["REG"], used["STACK"], used["LOCAL"]);
            let accesses = count(&["LDL", "STL"]);
            let shared = used["SHARED"] - processor.listed_bytes + dynamic_shared_bytes(&shape, kernel);
            let blocks = processor.occupancy(kernel, registers, shared);
            let share = 100 * blocks * kernel.threads() as usize / processor.threads;
            table.push(format!(
                "| {} | {} | {registers} | {stack} | {accesses} | {:.1} | {blocks} ({share}%) | {} | {} | {} |",
                kernel.name(),
                processor.architecture,
                shared as f64 / 1024.0,
                count(&["HMMA"]),
                count(&["LDSM"]),
                count(&["LDGSTS"]),
            ));
            if stack + local + accesses > 0 {
                wrong.push(format!("{} on {}: {stack} bytes of stack", kernel.name(), processor.architecture));
            }
            let attends = matches!(kernel, Kernel::AttendPrompt | Kernel::AttendToken);
            if attends && (count(&["HMMA"]) == 0 || count(&["LDSM"]) == 0 || count(&["LDGSTS"]) == 0) {
                wrong.push(format!("{} on {} lacks HMMA, LDSM or LDGSTS", kernel.name(), processor.architecture));
            }
            // The last thread block of a token reads what others have written, so it must invalidate the L1 cache after it has incremented
            // the counter. The emulation has no caches, so it cannot show that.
            if attends && (count(&["MEMBAR"]) < 2 || count(&["CCTL"]) < 2 || count(&["ATOMG"]) != 1) {
                wrong.push(format!("{} on {} lacks a fence or the counter", kernel.name(), processor.architecture));
            }
            let blocks_wanted = if attends && processor.shared_bytes > 200 << 10 { 2 } else { 1 };
            if blocks < blocks_wanted {
                wrong.push(format!("{} on {}: {blocks} thread blocks", kernel.name(), processor.architecture));
            }
        }
    }
    table.sort();
    let head = "| Kernel | Architecture | Registers | Stack, bytes | LDL + STL | Shared, KiB | Blocks an SM (threads) | HMMA | LDSM | LDGSTS |";
    writeln!(std::io::stdout(), "{head}\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n{}", table.join("\n")).unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn listings_of_cuobjdump_and_nvdisasm_are_parsed() {
    let usage = "Fatbin elf code:\nResource usage:\n Common:\n  GLOBAL:0\n Function embed:\n  REG:16 STACK:8 SHARED:64 LOCAL:0 CONSTANT[0]:32\n";
    let embed = &resources(usage)["embed"];
    assert_eq!((embed["REG"], embed["STACK"], embed["SHARED"], embed["LOCAL"]), (16, 8, 64, 0));
    let code = ".text.embed:\n        /*0000*/  LDC R1, c[0x0][0x28] ;\n        /*0010*/  @!P0 LDL.64 R2, [R1] ;\n        /*0020*/  EXIT ;\n";
    assert_eq!(opcodes(code)["embed"], [("EXIT", 1), ("LDC", 1), ("LDL", 1)].into());
}

#[test]
fn occupancy_is_limited_by_the_scarcest_resource() {
    let [_, hopper, _] = &MULTIPROCESSORS;
    for (kernel, registers, shared, expected) in [
        (Kernel::Embed, 16, 0, 8),
        (Kernel::Embed, 128, 0, 2),
        (Kernel::AttendPrompt, 255, 0, 2),
        (Kernel::AttendPrompt, 168, 104_448, 2),
        (Kernel::AttendPrompt, 168, 120_000, 1),
        (Kernel::Rope, 16, 0, 32),
    ] {
        assert_eq!(hopper.occupancy(kernel, registers, shared), expected, "{kernel:?}");
    }
}
