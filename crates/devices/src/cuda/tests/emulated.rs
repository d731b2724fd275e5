//! A GPU emulated on this host: kernels built with g++, GEMMs in double precision.
#![expect(unsafe_code, reason = "the emulation is a C++ library, which computes on memory by address")]

use super::*;
use crate::cuda::device::{CommunicatorId, Epilogue, Gemm, Imported, IpcHandle, Operands, PeerCommunicator, Purpose, Region};
use half::{bf16, f16};
use libloading::Library;
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ffi::{CString, c_void},
    path::Path,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

type LaunchKernel = unsafe extern "C" fn(*const i8, *const u32, u32, u32, *mut *mut c_void, u32) -> bool;

/// Orders of execution. Each is a sum of flags: 1 runs threads and blocks from last to first, and 2 performs asynchronous copies immediately,
/// not as late as possible.
pub(super) const ORDERS: [u32; 4] = [0, 1, 2, 3];

pub(super) struct Emulated {
    library: Arc<Library>,
    order: u32,
    /// Sizes of live allocations, by address.
    allocated: Arc<Mutex<HashMap<u64, usize>>>,
    /// The work captured so far; `None` if no capture is in progress.
    capture: Mutex<Option<Vec<Captured>>>,
    /// The numbers of captures and of replays, which `capture_counts` returns.
    counts: Arc<[AtomicUsize; 2]>,
    /// The GEMMs that this stream has prepared.
    prepared: Mutex<HashSet<Gemm>>,
    /// Whether every capture fails; set by `refuse_capture`.
    refuses_capture: Arc<AtomicBool>,
    /// The number of all-reduces until the device is lost; set by `fail_after`.
    sums_left: Arc<AtomicUsize>,
    /// Whether the stream waits for an all-reduce that will not end until its communicators are dropped.
    stuck: AtomicBool,
}

/// One captured operation.
pub(super) enum Captured {
    Copy { from: u64, to: u64, bytes: usize },
    Launch(Launch, Vec<u64>),
    Gemm(Gemm, Operands),
}

/// Returns the library with the kernels for a shape. Each library is built once per process.
fn library(shape: &Shape) -> Arc<Library> {
    static BUILT: Mutex<Vec<(Vec<String>, Arc<Library>)>> = Mutex::new(Vec::new());
    let definitions = shape.definitions();
    let mut built = BUILT.lock().unwrap();
    if let Some((_, library)) = built.iter().find(|(of, _)| *of == definitions) {
        return Arc::clone(library);
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernels.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/emulation/launch.cpp");
    let compiled = Command::new("g++")
        .args([
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unknown-pragmas",
            "-U_FORTIFY_SOURCE",
            "-shared",
            "-fPIC",
        ])
        .args(&definitions)
        .arg("-o")
        .arg(&file)
        .arg(source)
        .output()
        .expect("g++ is missing: install it (Debian: apt-get install g++)");
    assert!(compiled.status.success(), "g++ cannot compile the kernels:\n{}", String::from_utf8_lossy(&compiled.stderr));
    // SAFETY: the library was just built from our sources and has no initialisers.
    let library = Arc::new(unsafe { Library::new(&file) }.unwrap());
    built.push((definitions, Arc::clone(&library)));
    library
}

impl Emulated {
    pub fn new(shape: &Shape, order: u32) -> Self {
        Self {
            library: library(shape),
            order,
            allocated: Arc::default(),
            capture: Mutex::default(),
            counts: Arc::default(),
            prepared: Mutex::default(),
            refuses_capture: Arc::default(),
            sums_left: Arc::new(AtomicUsize::new(usize::MAX)),
            stuck: AtomicBool::default(),
        }
    }

    /// Makes every capture fail from now on, or no longer.
    pub fn refuse_capture(&self, refuses: bool) {
        self.refuses_capture.store(refuses, Ordering::Relaxed);
    }

    /// Loses the device after `sums` more all-reduces: calls that wait for it fail, and other ranks' all-reduces never end.
    pub fn fail_after(&self, sums: usize) {
        self.sums_left.store(sums, Ordering::Relaxed);
    }

    fn is_lost(&self) -> bool {
        self.sums_left.load(Ordering::Relaxed) == 0
    }

    /// Returns the numbers of captures (successful or not) and of replays on all streams.
    pub fn capture_counts(&self) -> [usize; 2] {
        self.counts.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Adds an operation to the current capture, if there is one; returns whether there is a capture.
    fn defer(&self, what: impl FnOnce() -> Captured) -> bool {
        let mut capture = self.capture.lock().unwrap();
        if let Some(recorded) = &mut *capture {
            recorded.push(what());
        }
        capture.is_some()
    }

    /// Panics during a capture. Must be called by each operation that a capture cannot contain.
    fn assert_not_capturing(&self) {
        assert!(self.capture.lock().unwrap().is_none(), "not allowed during a capture");
    }

    /// Panics if the stream is stuck or is being captured. Must be called by each operation that waits for the stream.
    fn assert_not_stuck(&self) {
        self.assert_not_capturing();
        assert!(!self.stuck.load(Ordering::Relaxed), "the host waits for a rank that waits for a lost rank");
    }

    /// Returns the total bytes of live allocations.
    pub fn allocated_bytes(&self) -> usize {
        self.allocated.lock().unwrap().values().sum()
    }

    /// Returns the kernels' constants PROMPT_ROWS, PROMPT_BYTES, TOKEN_ROWS, TOKEN_BYTES and HEADS_A_BLOCK.
    pub fn constants(&self) -> [u32; 5] {
        let mut constants = [0; 5];
        // SAFETY: the function has this type, and writes five numbers.
        unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn(*mut u32)> = self.library.get(b"constants").unwrap();
            function(constants.as_mut_ptr());
        }
        constants
    }

    fn check(&self, address: u64, len: usize) {
        let allocated = self.allocated.lock().unwrap();
        let inside = allocated.iter().any(|(start, bytes)| *start <= address && address + len as u64 <= start + *bytes as u64);
        assert!(inside, "{len} bytes at {address:#x} are not within one allocation");
    }

    fn read(&self, address: u64, into: &mut [u8]) {
        self.check(address, into.len());
        // SAFETY: the bytes are within a live allocation, and tests use a device from one thread.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, into.as_mut_ptr(), into.len());
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.check(address, bytes.len());
        // SAFETY: as in `read`.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len());
        }
    }

    fn read_all(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.read(address, &mut bytes);
        bytes
    }
}

fn widen(half: Half, bytes: [u8; 2]) -> f64 {
    match half {
        Half::Float16 => f16::from_le_bytes(bytes).to_f64(),
        Half::BFloat16 => bf16::from_le_bytes(bytes).to_f64(),
    }
}

pub(super) fn narrow(half: Half, number: f32) -> [u8; 2] {
    match half {
        Half::Float16 => f16::from_f32(number).to_le_bytes(),
        Half::BFloat16 => bf16::from_f32(number).to_le_bytes(),
    }
}

pub(super) fn widened(half: Half, bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<2>().0.iter().map(|bytes| widen(half, *bytes)).collect()
}

impl Device for Emulated {
    type Communicators = EmulatedCommunicators;

    const COMMUNICATOR_BYTES: usize = 1 << 20;

    fn connect_ranks(ranks: &[Arc<Self>]) -> Result<EmulatedCommunicators, CudaError> {
        let allocated: HashSet<_> = ranks.iter().map(|rank| Arc::as_ptr(&rank.allocated)).collect();
        assert_eq!(allocated.len(), ranks.len(), "the ranks have different devices");
        Ok(EmulatedCommunicators(ranks.to_vec()))
    }

    /// Adds the numbers in the order of the ranks.
    fn all_reduce_sum(_: &EmulatedCommunicators, ranks: &[(&Self, u64)], count: usize) -> Result<(), CudaError> {
        for (rank, _) in ranks {
            let fewer = |left| (left != usize::MAX).then(|| usize::saturating_sub(left, 1));
            let _ = rank.sums_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer);
        }
        if ranks.iter().any(|(rank, _)| rank.is_lost()) {
            ranks.iter().for_each(|(rank, _)| rank.stuck.store(!rank.is_lost(), Ordering::Relaxed));
            return Ok(());
        }
        let mut sums = vec![0f32; count];
        for (rank, address) in ranks {
            for (sum, number) in sums.iter_mut().zip(rank.read_all(*address, count * 4).as_chunks::<4>().0) {
                *sum += f32::from_le_bytes(*number);
            }
        }
        let sums: Vec<u8> = sums.into_iter().flat_map(f32::to_le_bytes).collect();
        ranks.iter().for_each(|(rank, address)| rank.write(*address, &sums));
        Ok(())
    }

    type Graph = Vec<Captured>;

    fn new_stream(&self, _: Purpose) -> Result<Self, CudaError> {
        let (library, allocated, counts) = (Arc::clone(&self.library), Arc::clone(&self.allocated), Arc::clone(&self.counts));
        let (refuses_capture, sums_left) = (Arc::clone(&self.refuses_capture), Arc::clone(&self.sums_left));
        let (capture, prepared, stuck) = (Mutex::default(), Mutex::default(), AtomicBool::default());
        Ok(Self { library, order: self.order, allocated, capture, counts, prepared, refuses_capture, sums_left, stuck })
    }

    fn multiprocessors(&self) -> usize {
        3
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        Ok((64 << 20) - self.allocated_bytes())
    }

    fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.assert_not_capturing();
        // SAFETY: the function has this type.
        let address = unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn(usize) -> u64> = self.library.get(b"allocate").unwrap();
            function(bytes)
        };
        assert_ne!(address, 0, "the host is out of memory");
        self.allocated.lock().unwrap().insert(address, bytes);
        Ok(address)
    }

    fn free(&self, address: u64) {
        self.assert_not_stuck();
        let bytes = self.allocated.lock().unwrap().remove(&address).expect("memory is freed once, and was allocated here");
        // SAFETY: the function has this type, and the memory was allocated with this size.
        unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn(u64, usize)> = self.library.get(b"release").unwrap();
            function(address, bytes);
        }
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.assert_not_stuck();
        self.write(to, bytes);
        Ok(())
    }

    fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.assert_not_stuck();
        self.read(from, into);
        Ok(())
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.assert_not_stuck();
        Self::wait_all(&[self])
    }

    fn wait_all(ranks: &[&Self]) -> Result<(), CudaError> {
        match ranks.iter().find(|rank| rank.is_lost()) {
            Some(_) => Err(CudaError::Driver { doing: "testing", source: "the device is lost".into() }),
            None => {
                ranks.iter().for_each(|rank| rank.assert_not_stuck());
                Ok(())
            }
        }
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        if self.defer(|| Captured::Copy { from, to, bytes }) {
            return Ok(());
        }
        self.upload(to, &self.read_all(from, bytes))
    }

    fn launch(&self, launch: Launch, arguments: &mut [u64]) -> Result<(), CudaError> {
        if self.defer(|| Captured::Launch(launch, arguments.to_vec())) {
            return Ok(());
        }
        let grid = launch.grid.map(|blocks| blocks as u32);
        assert!(
            grid[0] > 0 && (1..=65_535).contains(&grid[1]) && (1..=65_535).contains(&grid[2]),
            "{launch:?} has an invalid grid"
        );
        let name = CString::new(launch.kernel.name()).unwrap();
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
        // SAFETY: the function has this type; it reads the arguments that the kernel of this name has.
        let known = unsafe {
            let function: libloading::Symbol<'_, LaunchKernel> = self.library.get(b"launch").unwrap();
            let (threads, shared) = (launch.kernel.threads(), launch.shared_bytes as u32);
            function(name.as_ptr().cast(), grid.as_ptr(), threads, shared, pointers.as_mut_ptr(), self.order)
        };
        assert!(known, "there is no kernel {}", launch.kernel.name());
        Ok(())
    }

    fn gemm(&self, (gemm, operands): (Gemm, Operands)) -> Result<(), CudaError> {
        if self.defer(|| Captured::Gemm(gemm, operands)) {
            assert!(self.prepared.lock().unwrap().contains(&gemm), "{gemm:?} was not prepared");
            return Ok(());
        }
        let Gemm { half, rows, inputs, outputs, epilogue } = gemm;
        let weights = widened(half, &self.read_all(operands.weights, outputs * inputs * 2));
        let all = widened(half, &self.read_all(operands.inputs, rows * inputs * 2));
        let bytes = if epilogue == Epilogue::StoreHalf { 2 } else { 4 };
        let mut all_out = self.read_all(operands.outputs, rows * outputs * bytes);
        for (row, out) in all.chunks_exact(inputs).zip(all_out.chunks_exact_mut(outputs * bytes)) {
            for (weights, out) in weights.chunks_exact(inputs).zip(out.chunks_exact_mut(bytes)) {
                let sum = weights.iter().zip(row).map(|(weight, input)| weight * input).sum::<f64>() as f32;
                match epilogue {
                    Epilogue::StoreHalf => out.copy_from_slice(&narrow(half, sum)),
                    Epilogue::StoreSingle => out.copy_from_slice(&sum.to_le_bytes()),
                    Epilogue::AddSingle => {
                        let before = f32::from_le_bytes(out.try_into().unwrap());
                        out.copy_from_slice(&(before + sum).to_le_bytes());
                    }
                }
            }
        }
        self.write(operands.outputs, &all_out);
        Ok(())
    }

    /// Checks the GEMMs and records that they are prepared. Does not time them.
    fn prepare(&self, gemms: &[(Gemm, Vec<Operands>)], _limit: Duration) -> Result<(), CudaError> {
        for (Gemm { rows, inputs, outputs, .. }, operands) in gemms {
            for operands in operands {
                self.check(operands.weights, outputs * inputs * 2);
                self.check(operands.inputs, rows * inputs * 2);
            }
        }
        self.prepared.lock().unwrap().extend(gemms.iter().map(|(gemm, _)| *gemm));
        Ok(())
    }

    fn capture(&self, work: impl Fn() -> Result<(), CudaError>) -> Result<Self::Graph, CudaError> {
        self.assert_not_capturing();
        *self.capture.lock().unwrap() = Some(Vec::new());
        let worked = work();
        let recorded = self.capture.lock().unwrap().take().unwrap();
        self.counts[0].fetch_add(1, Ordering::Relaxed);
        worked?;
        match self.refuses_capture.load(Ordering::Relaxed) {
            true => Err(CudaError::Driver { doing: "testing", source: "capture refused".into() }),
            false => Ok(recorded),
        }
    }

    fn replay(&self, graph: &Self::Graph) -> Result<(), CudaError> {
        self.assert_not_capturing();
        self.counts[1].fetch_add(1, Ordering::Relaxed);
        graph.iter().try_for_each(|recorded| match recorded {
            Captured::Copy { from, to, bytes } => self.copy(*from, *to, *bytes),
            Captured::Launch(launch, arguments) => self.launch(*launch, &mut arguments.clone()),
            Captured::Gemm(gemm, operands) => self.gemm((*gemm, *operands)),
        })
    }

    fn export(&self, address: u64) -> Result<IpcHandle, CudaError> {
        let bytes = self.allocated.lock().unwrap()[&address] as u64;
        let mut exported: IpcHandle = [0; 64];
        exported[..8].copy_from_slice(&address.to_le_bytes());
        exported[8..16].copy_from_slice(&bytes.to_le_bytes());
        Ok(exported)
    }

    fn import(&self, exported: &IpcHandle) -> Result<Imported, CudaError> {
        let number = |at: usize| u64::from_le_bytes(*exported[at..].first_chunk().unwrap());
        let known = self.allocated.lock().unwrap().insert(number(0), number(8) as usize);
        assert!(known.is_none(), "a device cannot import its own memory");
        Ok(Imported { address: number(0), bytes: Some(number(8) as usize) })
    }

    fn close(&self, address: u64) {
        self.allocated.lock().unwrap().remove(&address).expect("memory is closed once, and was opened here");
    }

    type PeerCommunicator = Pipe;

    fn nccl_available() -> bool {
        true
    }

    fn new_communicator_id() -> Result<CommunicatorId, CudaError> {
        static NAMED: AtomicU64 = AtomicU64::new(0);
        let mut name = [0; 128];
        name[..8].copy_from_slice(&NAMED.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        Ok(name)
    }

    fn connect_peer(&self, id: &CommunicatorId, rank: u32, _limit: Duration) -> Result<Pipe, CudaError> {
        static PIPES: Mutex<BTreeMap<CommunicatorId, [Option<PipeEnd>; 2]>> = Mutex::new(BTreeMap::new());
        let mut pipes = PIPES.lock().unwrap();
        let ends = pipes.entry(*id).or_insert_with(|| {
            let (sender, receiver) = mpsc::channel();
            [Some(PipeEnd::Sends(sender)), Some(PipeEnd::Receives(receiver))]
        });
        let end = ends[rank as usize].take().expect("each rank joins once");
        Ok(Pipe { device: self.new_stream(Purpose::Copies)?, end: Mutex::new(end) })
    }
}

/// The ranks that are connected for all-reduces. Dropping this value ends their waits for a lost rank.
pub(super) struct EmulatedCommunicators(Vec<Arc<Emulated>>);

impl Drop for EmulatedCommunicators {
    fn drop(&mut self) {
        self.0.iter().for_each(|rank| rank.stuck.store(false, Ordering::Relaxed));
    }
}

enum PipeEnd {
    Sends(mpsc::Sender<Vec<Vec<u8>>>),
    Receives(mpsc::Receiver<Vec<Vec<u8>>>),
}

/// One end of a communicator between two ranks of this process.
pub(super) struct Pipe {
    device: Emulated,
    end: Mutex<PipeEnd>,
}

impl PeerCommunicator for Pipe {
    fn send(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError> {
        let PipeEnd::Sends(sender) = &*self.end.lock().unwrap() else { panic!("this rank receives") };
        let bytes = regions.iter().map(|(address, bytes)| self.device.read_all(*address, *bytes)).collect();
        sender.send(bytes).map_err(|_| late(limit))
    }

    fn receive(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError> {
        let PipeEnd::Receives(receiver) = &*self.end.lock().unwrap() else { panic!("this rank sends") };
        let received = receiver.recv_timeout(limit).map_err(|_| late(limit))?;
        assert_eq!(received.len(), regions.len(), "both ranks have the same number of regions");
        for ((address, bytes), received) in regions.iter().zip(received) {
            assert_eq!(received.len(), *bytes, "both ranks have regions of the same lengths");
            self.device.write(*address, &received);
        }
        Ok(())
    }
}

fn late(limit: Duration) -> CudaError {
    CudaError::Nccl { doing: "testing", source: format!("the operation did not end within {limit:?}").into() }
}
