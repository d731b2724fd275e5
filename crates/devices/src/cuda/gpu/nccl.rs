//! NCCL: sends memory from one GPU to another, and sums tensors over several GPUs.
//!
//! Every wait for another rank has a time limit, so this module polls NCCL. When the limit is reached or NCCL reports an error, the
//! communicator is aborted and cannot be used any more. The GPU can still be used. The library is opened when the first communicator is
//! created.

use super::{Context, DRIVER_LOCK, driver_lock};
use crate::cuda::{
    CudaError,
    device::{CommunicatorId, PeerCommunicator, Region},
};
use cudarc::driver::{
    result::{self, DriverError, stream::StreamKind},
    sys::{self, CUresult, CUstream},
};
use libloading::Library;
use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr::null_mut,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, TryLockError,
        atomic::{AtomicPtr, Ordering},
    },
    time::Duration,
};
use tokio::time::Instant;

/// File names of the NCCL library. Python's wheel and Debian's package have only the first name. NVIDIA's archive has both.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The pause between two polls.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Time limit for each of two waits when a communicator is dropped: for the other rank to finalise as well, and then for the driver lock.
const FINALIZE_MAX: Duration = Duration::from_secs(2);

// The following constants are those of nccl.h.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

type Handle = *mut c_void;
/// The type of `ncclSend` and `ncclRecv`: address, count, type, peer, communicator, stream.
type TransferFn = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int;

/// `ncclUniqueId`, which is passed by value.
#[repr(C)]
struct UniqueId(CommunicatorId);

/// `ncclConfig_t` of NCCL 2.14. A later library determines from `size` and `version` which of its fields this struct lacks, and uses their
/// defaults.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Left unset: version 2.14 has padding here, later versions have their first additional field.
    cga_cluster_size: c_int,
}

impl Config {
    fn new(blocking: c_int) -> Self {
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking, cga_cluster_size: c_int::MIN }
    }
}

/// The functions of the NCCL library. They are not loaded with cudarc's loader, which searches for other file names and panics if it finds
/// none. Besides, cudarc's result type is an enum of one version, so a code of a later version would be undefined behaviour.
pub(in crate::cuda) struct Nccl {
    get_unique_id: unsafe extern "C" fn(*mut CommunicatorId) -> c_int,
    init: unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(Handle, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(Handle) -> c_int,
    destroy: unsafe extern "C" fn(Handle) -> c_int,
    abort: unsafe extern "C" fn(Handle) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    send: TransferFn,
    receive: TransferFn,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    /// The library must stay loaded while its functions are used.
    _library: Library,
}

/// The reason why a communicator cannot be used.
#[derive(Debug, thiserror::Error)]
pub(in crate::cuda) enum NcclError {
    #[error("{what}, ncclResult_t {code}")]
    Refused { code: c_int, what: String },
    #[error("the operation did not end within {0:?}")]
    Late(Duration),
    #[error("the communicator was aborted after an earlier failure")]
    Broken,
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn failed(doing: &'static str) -> impl Fn(NcclError) -> CudaError {
    move |source| CudaError::Nccl { doing, source: Box::new(source) }
}

impl Nccl {
    /// Returns the library. It is searched for once per process, because a process loads a shared library once. Fails if it is not found,
    /// or older than 2.14.
    pub fn load() -> Result<Arc<Self>, CudaError> {
        static LOADED: OnceLock<Option<Arc<Nccl>>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| NAMES.into_iter().find_map(Self::open).map(Arc::new));
        loaded.clone().ok_or(CudaError::NoLibrary { library: "libnccl.so.2, 2.14 or later,", package: "nvidia-nccl-cu13" })
    }

    /// Opens the library of this file name. Returns `None` if it is not found, or if it lacks one of the functions.
    fn open(name: &str) -> Option<Self> {
        // SAFETY: opening a library runs nothing but its own initialisers; the function types are those of nccl.h, whose enums have 32
        // bits.
        unsafe {
            let library = Library::new(name).ok()?;
            Some(Self {
                get_unique_id: *library.get("ncclGetUniqueId").ok()?,
                init: *library.get("ncclCommInitRankConfig").ok()?,
                async_error: *library.get("ncclCommGetAsyncError").ok()?,
                finalize: *library.get("ncclCommFinalize").ok()?,
                destroy: *library.get("ncclCommDestroy").ok()?,
                abort: *library.get("ncclCommAbort").ok()?,
                group_start: *library.get("ncclGroupStart").ok()?,
                group_end: *library.get("ncclGroupEnd").ok()?,
                send: *library.get("ncclSend").ok()?,
                receive: *library.get("ncclRecv").ok()?,
                all_reduce: *library.get("ncclAllReduce").ok()?,
                error_string: *library.get("ncclGetErrorString").ok()?,
                get_version: *library.get("ncclGetVersion").ok()?,
                _library: library,
            })
        }
    }

    /// Returns the library's version, such as 2.28.0; `None` if the library does not report it.
    pub fn version(&self) -> Option<String> {
        let mut version = 0;
        // SAFETY: the function writes one integer.
        self.check(unsafe { (self.get_version)(&mut version) }).ok()?;
        Some(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    /// Returns a new id, which all ranks of one communicator must use.
    pub fn unique_id(&self) -> Result<CommunicatorId, CudaError> {
        let mut id = [0; 128];
        // SAFETY: the function writes 128 bytes.
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check(code).map_err(failed("creating a communicator id"))?;
        Ok(id)
    }

    fn check(&self, code: c_int) -> Result<(), NcclError> {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: the function returns a static string, ending with a NUL, for every code.
        let what = unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy().into_owned();
        Err(NcclError::Refused { code, what })
    }

    /// Makes the calls as one NCCL group, which is ended even if they fail.
    fn group(&self, calls: impl FnOnce() -> Result<(), NcclError>) -> Result<(), NcclError> {
        // SAFETY: a group belongs to the calling thread, and is ended below.
        self.check(unsafe { (self.group_start)() })?;
        let called = calls();
        // SAFETY: the group was started above.
        let ended = self.check(unsafe { (self.group_end)() });
        called.and(ended)
    }

    /// Returns whether all calls on a communicator have been started on the device.
    fn ready(&self, handle: Handle) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: the caller guarantees that the communicator is alive; the function writes one 32-bit state.
        self.check(unsafe { (self.async_error)(handle, &mut state) })?;
        self.check(state)?;
        Ok(state != IN_PROGRESS)
    }
}

/// Polls `done` until it returns true or an error. Returns [`NcclError::Late`] when `limit` has passed since `began`.
fn poll_until(began: Instant, limit: Duration, mut done: impl FnMut() -> Result<bool, NcclError>) -> Result<(), NcclError> {
    while !done()? {
        if began.elapsed() >= limit {
            return Err(NcclError::Late(limit));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// Takes the driver lock in order to end a communicator, which frees memory. Returns `None` after `FINALIZE_MAX`: a thread that holds the
/// lock for longer may be waiting for the communicator that is to be ended.
fn driver_lock_within_limit() -> Option<MutexGuard<'static, ()>> {
    let mut locked = None;
    let _ = poll_until(Instant::now(), FINALIZE_MAX, || {
        locked = match DRIVER_LOCK.try_lock() {
            Err(TryLockError::WouldBlock) => None,
            other => Some(other.expect("no call panics")),
        };
        Ok(locked.is_some())
    });
    locked
}

/// A rank's number, and the number of ranks in its communicator.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Rank {
    pub rank: u32,
    pub ranks: u32,
}

/// One rank of an NCCL communicator.
pub(in crate::cuda) struct Communicator {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    /// A separate stream, so that transfers do not wait for the GPU's other work.
    stream: CUstream,
    rank: u32,
    /// Whether all ranks are in this process.
    in_process: bool,
    /// Null after an abort. The lock admits one call at a time.
    handle: Mutex<Handle>,
}

// SAFETY: NCCL and the driver allow their handles to be used from any thread.
unsafe impl Send for Communicator {}
// SAFETY: a driver handle may be used by several threads at a time; an NCCL handle by one at a time, which the lock ensures.
unsafe impl Sync for Communicator {}

/// Creates a stream of the highest priority. Streams share a few hardware queues, each of which serves one priority: if transfers had the
/// priority of steps, a step could be queued behind a transfer that waits for another rank.
fn high_priority_stream() -> Result<CUstream, DriverError> {
    let (_, greatest) = result::stream::get_priority_range()?;
    result::stream::create_with_priority(StreamKind::NonBlocking, greatest)
}

impl Communicator {
    /// Joins the communicator with this id. Returns when all ranks have joined; fails after `limit`.
    pub fn new(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: CommunicatorId,
        rank: Rank,
        limit: Duration,
    ) -> Result<Self, CudaError> {
        let mut communicators = Self::join(nccl, &[Arc::clone(context)], id, rank, limit)?;
        Ok(communicators.pop().expect("one context makes one communicator"))
    }

    /// Creates a communicator whose ranks are GPUs of this process. Its calls block until the work has been enqueued, which no other
    /// process can delay; in non-blocking mode NCCL would start a thread for every call.
    pub fn all(nccl: &Arc<Nccl>, contexts: &[Arc<Context>]) -> Result<Vec<Self>, CudaError> {
        Self::join(nccl, contexts, nccl.unique_id()?, Rank { rank: 0, ranks: contexts.len() as u32 }, Duration::ZERO)
    }

    /// Joins one rank for each context, from rank `first` on. All join together, since each waits for all others.
    fn join(
        nccl: &Arc<Nccl>,
        contexts: &[Arc<Context>],
        id: CommunicatorId,
        Rank { rank: first, ranks }: Rank,
        limit: Duration,
    ) -> Result<Vec<Self>, CudaError> {
        let in_process = contexts.len() == ranks as usize;
        let failed = failed("connecting GPUs");
        let mut communicators = Vec::with_capacity(contexts.len());
        let locked = driver_lock();
        for (context, rank) in contexts.iter().zip(first..) {
            context.enter()?;
            let stream = high_priority_stream().map_err(|error| failed(error.into()))?;
            let (nccl, context) = (Arc::clone(nccl), Arc::clone(context));
            communicators.push(Self { nccl, context, stream, rank, in_process, handle: Mutex::new(null_mut()) });
        }
        // The driver lock is released if other processes have to be waited for.
        let locked = in_process.then_some(locked);
        let handles: Vec<AtomicPtr<c_void>> = contexts.iter().map(|_| AtomicPtr::default()).collect();
        let began = Instant::now();
        let begun = nccl.group(|| {
            for (context, (handle, rank)) in contexts.iter().zip(handles.iter().zip(first..)) {
                context.enter().map_err(|_| NcclError::Broken)?;
                let mut config = Config::new(in_process.into());
                // SAFETY: the configuration is read during the call. The handle may be written until the rank has joined, which is awaited
                // below.
                let code = unsafe { (nccl.init)(handle.as_ptr(), ranks as c_int, UniqueId(id), rank as c_int, &mut config) };
                nccl.check(code)?;
            }
            Ok(())
        });
        let handle = |handle: &AtomicPtr<c_void>| handle.load(Ordering::Acquire);
        let connected = begun.and_then(|()| {
            poll_until(began, limit, || handles.iter().try_fold(true, |all, one| Ok(nccl.ready(handle(one))? && all)))
        });
        drop(locked);
        for (communicator, one) in communicators.iter_mut().zip(&handles) {
            *communicator.handle.get_mut().expect("the communicator is not shared yet") = handle(one);
            if connected.is_err() {
                communicator.abort_now();
            }
        }
        connected.map_err(failed)?;
        Ok(communicators)
    }

    /// Sends regions to other regions of the same GPU. A machine with one GPU has no peer, so it can test `send` and `receive` only in this
    /// form.
    pub fn nccl_self_test(&self, from: &[Region], to: &[Region], limit: Duration) -> Result<(), CudaError> {
        let itself = self.rank as c_int;
        let both = [(self.nccl.send, itself, from), (self.nccl.receive, itself, to)];
        self.exchange(&both, limit).map_err(failed("sending to the same GPU"))
    }

    /// Sends or receives regions. Returns when all transfers are done. On failure, aborts the communicator and waits until no transfer can
    /// write to memory any more.
    fn exchange(&self, transfers: &[(TransferFn, c_int, &[Region])], limit: Duration) -> Result<(), NcclError> {
        let nccl = &self.nccl;
        let exchanged = self.with_handle(|handle| {
            let began = Instant::now();
            nccl.group(|| {
                let all = transfers
                    .iter()
                    .flat_map(|(function, peer, regions)| regions.iter().map(move |region| (function, *peer, region)));
                all.into_iter().try_for_each(|(function, peer, (address, bytes))| {
                    // SAFETY: communicator and stream are alive; the caller keeps the memory until this returns.
                    nccl.check(unsafe { function(*address as *mut c_void, *bytes, UINT8, peer, handle, self.stream) })
                })
            })?;
            poll_until(began, limit, || nccl.ready(handle))?;
            poll_until(began, limit, || match self.state() {
                CUresult::CUDA_ERROR_NOT_READY => nccl.ready(handle).map(|_| false),
                other => Ok(other.result().map(|()| true)?),
            })
        });
        if exchanged.is_err() {
            self.abort_now();
            self.wait_until_idle();
        }
        exchanged
    }

    /// Returns when the stream is idle, however long that takes. An abort may return before running transfers have ended, but no transfer
    /// may write to the memory once the caller reuses it.
    fn wait_until_idle(&self) {
        // If the device has failed, it executes nothing, so nothing is left to wait for.
        while self.context.enter().is_ok() && self.state() == CUresult::CUDA_ERROR_NOT_READY {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn state(&self) -> CUresult {
        // SAFETY: the stream is destroyed in `drop` only.
        unsafe { sys::cuStreamQuery(self.stream) }
    }

    /// Makes calls with exclusive use of the communicator, in its GPU's context. Fails if it has been aborted.
    fn with_handle<T>(&self, calls: impl FnOnce(Handle) -> Result<T, NcclError>) -> Result<T, NcclError> {
        let handle = self.handle.lock().expect("no call panics");
        if handle.is_null() || self.context.enter().is_err() {
            return Err(NcclError::Broken);
        }
        calls(*handle)
    }

    /// Aborts running transfers; later calls fail.
    fn abort_now(&self) {
        let handle = std::mem::replace(&mut *self.handle.lock().expect("no call panics"), null_mut());
        if !handle.is_null() && self.context.enter().is_ok() {
            let _locked = driver_lock_within_limit();
            // SAFETY: the communicator was alive, and this was its only handle.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }
}

impl PeerCommunicator for Communicator {
    /// This method does not wait for work on other streams, so the regions must be completely written before the call.
    fn send(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError> {
        let peer = 1 - self.rank as c_int;
        self.exchange(&[(self.nccl.send, peer, regions)], limit).map_err(failed("sending to another GPU"))
    }

    fn receive(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError> {
        let peer = 1 - self.rank as c_int;
        self.exchange(&[(self.nccl.receive, peer, regions)], limit).map_err(failed("receiving from another GPU"))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = *self.handle.get_mut().expect("no call panics");
        if self.context.enter().is_err() {
            return;
        }
        // `ncclCommDestroy` may wait for the other rank unless both ranks have finalised. Ranks of one process are aborted instead: they
        // are dropped one after the other, and a collective that still runs because a GPU was lost never ends.
        let ended = || {
            // SAFETY: the communicator is alive, and no further calls follow.
            self.nccl.check(unsafe { (self.nccl.finalize)(handle) })?;
            poll_until(Instant::now(), FINALIZE_MAX, || self.nccl.ready(handle))
        };
        let ends_itself = !handle.is_null() && !self.in_process && ended().is_ok();
        let _locked = driver_lock_within_limit();
        // SAFETY: communicator and stream are alive, no further calls follow, and each is released once. Errors cannot be handled here.
        unsafe {
            if !handle.is_null() {
                let _ = if ends_itself { (self.nccl.destroy)(handle) } else { (self.nccl.abort)(handle) };
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// One rank's 32-bit floats in an all-reduce, and the stream that executes the all-reduce.
pub(super) struct RankBuffer<'a> {
    pub communicator: &'a Communicator,
    pub stream: CUstream,
    pub address: u64,
}

/// Replaces every rank's `count` numbers with their sums over all ranks. On each rank's stream, the all-reduce is ordered with the stream's
/// other work. All ranks must be in this process (`Communicator::all`).
pub(super) fn all_reduce_sum(buffers: &[RankBuffer<'_>], count: usize) -> Result<(), NcclError> {
    let Some(nccl) = buffers.first().map(|buffer| &buffer.communicator.nccl) else { return Ok(()) };
    let put = |buffer: &RankBuffer<'_>| {
        buffer.communicator.with_handle(|handle| {
            let numbers = buffer.address as *mut c_void;
            // SAFETY: communicator and stream are alive, and so is the memory until the stream has executed the call.
            nccl.check(unsafe { (nccl.all_reduce)(numbers, numbers, count, FLOAT32, SUM, handle, buffer.stream) })
        })
    };
    // Engines of one process share GPUs. The lock makes the order of all-reduces the same on all GPUs.
    let locked = driver_lock();
    let summed = nccl.group(|| buffers.iter().try_for_each(put));
    drop(locked);
    let ready = |buffer: &RankBuffer<'_>| buffer.communicator.with_handle(|handle| nccl.ready(handle)).map(drop);
    let done = summed.and_then(|()| buffers.iter().try_for_each(ready));
    done.inspect_err(|_| buffers.iter().for_each(|buffer| buffer.communicator.abort_now()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn config_has_the_layout_of_nccl_2_14() {
        // SAFETY: the struct has no padding, and any bytes are valid as `u8`.
        let bytes: [u8; 24] = unsafe { std::mem::transmute(Config::new(0)) };
        let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        assert_eq!([0, 4, 8, 12, 16, 20].map(number), [24, 0, 0xcafe_beef, 21_400, 0, 0x8000_0000]);
        assert_eq!(Config::new(1).blocking, 1);
    }

    #[test]
    fn missing_or_foreign_library_is_not_opened() {
        assert!(Nccl::open("libnccl-is-not-here.so.2").is_none());
        assert!(Nccl::open("libc.so.6").is_none());
    }

    /// Whether NCCL is found depends on the machine. The test passes in both cases.
    #[test]
    fn missing_nccl_error_names_the_package_to_install() {
        match Nccl::load() {
            Err(error) => {
                let message = error.to_string();
                assert!(message.contains("libnccl.so.2") && message.contains("nvidia-nccl-cu13"), "{message}");
            }
            Ok(nccl) => {
                let refused = nccl.check(5).unwrap_err().to_string();
                assert!(refused.starts_with("invalid usage") && refused.ends_with(", result 5"), "{refused}");
                assert!(nccl.check(IN_PROGRESS).is_ok());
                assert_ne!(nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
            }
        }
    }

    #[test]
    fn polling_ends_on_success_error_or_timeout() {
        let mut looks = 0;
        let third = poll_until(Instant::now(), Duration::from_secs(60), || {
            looks += 1;
            Ok(looks == 3)
        });
        assert!(third.is_ok() && looks == 3);
        assert!(matches!(poll_until(Instant::now(), Duration::from_secs(60), || Err(NcclError::Broken)), Err(NcclError::Broken)));
        let limit = Duration::from_millis(1);
        assert!(matches!(poll_until(Instant::now(), limit, || Ok(false)), Err(NcclError::Late(late)) if late == limit));
    }
}
