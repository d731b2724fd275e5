//! NCCL: memory from one GPU to another, and sums over several.
//!
//! - What the other rank may hold up has a limit. NCCL is asked again and again whether it is done, and when time is up, or it reports an error,
//!   the communicator is aborted and of no use any more. The GPU still is.
//! - The library is looked for when the first communicator is wanted, and everything else works without.

use super::{Context, DRIVER_LOCK, driver_lock};
use crate::cuda::CudaError;
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

/// Pip's wheel and Debian's package have the first name only, NVIDIA's archive both.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Between two looks at whether something is done.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// For the other rank to end as well, before a communicator is dropped without it; and for others to be done with what is in order.
const FINALIZE_MAX: Duration = Duration::from_secs(2);

// Of nccl.h.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// Names the two ends of a communicator to each other.
pub(in crate::cuda) type Id = [u8; 128];

type Handle = *mut c_void;
/// Address and bytes.
type Region = (u64, usize);
/// `ncclSend`, and `ncclRecv`: address, count, type, peer.
type TransferFn = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, CUstream) -> c_int;

/// Passed by value.
#[repr(C)]
struct UniqueId(Id);

/// `ncclConfig_t` as version 2.14 had it: a later library knows by size and version what is missing, and takes its defaults.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    /// Not set: padding in 2.14, and since then the first number that came after.
    cga_cluster_size: c_int,
}

impl Config {
    fn new(blocking: bool) -> Self {
        let blocking = blocking.into();
        Self { size: size_of::<Self>(), magic: 0xcafe_beef, version: 21_400, blocking, cga_cluster_size: c_int::MIN }
    }
}

/// The library.
///
/// Not cudarc's: that one looks for other names and panics without, and its results are an enum of one version, which must not be given the
/// number of a later one.
pub(in crate::cuda) struct Nccl {
    get_unique_id: unsafe extern "C" fn(*mut Id) -> c_int,
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
    /// The functions are of it.
    _library: Library,
}

/// Why a communicator is of no use.
#[derive(Debug, thiserror::Error)]
pub(in crate::cuda) enum NcclError {
    #[error("{what}, result {code}")]
    Refused { code: c_int, what: String },
    #[error("not done after {0:?}")]
    Late(Duration),
    #[error("it was given up when something failed before")]
    Broken,
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn failed(doing: &'static str) -> impl Fn(NcclError) -> CudaError {
    move |source| CudaError::Nccl { doing, source: Box::new(source) }
}

impl Nccl {
    /// Looks for it once a process.
    pub fn load() -> Result<Arc<Self>, CudaError> {
        static LOADED: OnceLock<Option<Arc<Nccl>>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| NAMES.into_iter().find_map(Self::open).map(Arc::new));
        loaded.clone().ok_or(CudaError::NoLibrary { library: "libnccl.so.2, 2.14 or later,", package: "nvidia-nccl-cu13" })
    }

    /// `None` where there is no such library, or it is older than what is called of it.
    fn open(name: &str) -> Option<Self> {
        // SAFETY: opening it runs nothing but its own initialisers; the types are those of nccl.h, where enums are numbers of four bytes.
        #[expect(unsafe_code)]
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
                _library: library,
            })
        }
    }

    /// For one communicator, whose ranks all must have it.
    pub fn unique_id(&self) -> Result<Id, CudaError> {
        let mut id = [0; 128];
        // SAFETY: it fills as many bytes.
        #[expect(unsafe_code)]
        let code = unsafe { (self.get_unique_id)(&mut id) };
        self.check(code).map_err(failed("naming a connection"))?;
        Ok(id)
    }

    fn check(&self, code: c_int) -> Result<(), NcclError> {
        if matches!(code, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: it has a text for every number, which is the library's own and ends with a zero.
        #[expect(unsafe_code)]
        let what = unsafe { CStr::from_ptr((self.error_string)(code)) }.to_string_lossy().into_owned();
        Err(NcclError::Refused { code, what })
    }

    /// The calls as one group, which ends whatever they give.
    fn group(&self, calls: impl FnOnce() -> Result<(), NcclError>) -> Result<(), NcclError> {
        // SAFETY: a group is of this thread, and is ended below.
        #[expect(unsafe_code)]
        self.check(unsafe { (self.group_start)() })?;
        let called = calls();
        // SAFETY: it was begun above.
        #[expect(unsafe_code)]
        let ended = self.check(unsafe { (self.group_end)() });
        called.and(ended)
    }

    /// Whether all that a communicator was asked for has begun.
    fn ready(&self, handle: Handle) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, as the caller promises; the state goes to a number of the size it has.
        #[expect(unsafe_code)]
        self.check(unsafe { (self.async_error)(handle, &mut state) })?;
        self.check(state)?;
        Ok(state != IN_PROGRESS)
    }
}

/// Looks until it is done, an error, or later than the limit allows.
fn poll_until(began: Instant, limit: Duration, mut done: impl FnMut() -> Result<bool, NcclError>) -> Result<(), NcclError> {
    while !done()? {
        if began.elapsed() >= limit {
            return Err(NcclError::Late(limit));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}

/// To end a communicator, which gives memory back. Who has the lock for longer waits for what is about to be ended.
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

/// Which of a communicator's ranks one is.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Rank {
    pub rank: u32,
    pub ranks: u32,
}

/// One GPU's end of a connection to others.
pub(in crate::cuda) struct Communicator {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    /// What is sent and received waits for nothing else of the GPU.
    stream: CUstream,
    rank: u32,
    /// All ranks are of this process.
    in_process: bool,
    /// Null once it was given up. One call at a time.
    handle: Mutex<Handle>,
}

// SAFETY: NCCL's and the driver's handles may be used from any thread; the former by one at a time, which the lock sees to.
#[expect(unsafe_code)]
unsafe impl Send for Communicator {}
// SAFETY: likewise.
#[expect(unsafe_code)]
unsafe impl Sync for Communicator {}

/// A stream of the highest priority: a GPU has few queues, each with streams of one priority, and a step must not be behind what waits here for
/// another rank.
fn high_priority_stream() -> Result<CUstream, DriverError> {
    let (_, greatest) = result::stream::get_priority_range()?;
    result::stream::create_with_priority(StreamKind::NonBlocking, greatest)
}

impl Communicator {
    /// One rank of those that have this id. It returns when all have connected, or after `limit` with an error.
    pub fn new(nccl: &Arc<Nccl>, context: &Arc<Context>, id: Id, rank: Rank, limit: Duration) -> Result<Self, CudaError> {
        let communicators = Self::join(nccl, &[Arc::clone(context)], id, rank, limit)?;
        Ok(communicators.into_iter().next().expect("one context is one rank"))
    }

    /// All ranks of a communicator, each with a GPU of this process.
    ///
    /// They block: what they are asked for has begun when the call returns, while NCCL would start a thread for every call otherwise. No other
    /// process can hold that up.
    pub fn all(nccl: &Arc<Nccl>, contexts: &[Arc<Context>]) -> Result<Vec<Self>, CudaError> {
        Self::join(nccl, contexts, nccl.unique_id()?, Rank { rank: 0, ranks: contexts.len() as u32 }, Duration::ZERO)
    }

    /// The ranks from `first` on, at once: each waits for all others.
    fn join(
        nccl: &Arc<Nccl>,
        contexts: &[Arc<Context>],
        id: Id,
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
        // Ranks of other processes connected when they like.
        let locked = in_process.then_some(locked);
        let handles: Vec<AtomicPtr<c_void>> = contexts.iter().map(|_| AtomicPtr::default()).collect();
        let began = Instant::now();
        let begun = nccl.group(|| {
            for (context, (handle, rank)) in contexts.iter().zip(handles.iter().zip(first..)) {
                context.enter().map_err(|_| NcclError::Broken)?;
                let mut config = Config::new(in_process);
                // SAFETY: the configuration is read during the call. The handle may be written until the rank has connected, which is waited for below.
                #[expect(unsafe_code)]
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
            *communicator.handle.get_mut().expect("nobody has used it") = handle(one);
            if connected.is_err() {
                communicator.abort_communicator();
            }
        }
        connected.map_err(failed)?;
        Ok(communicators)
    }

    /// Sends regions of memory (address and bytes) to the one other rank, which must receive regions of the same lengths in this order.
    /// They must hold what is to be sent: it does not wait for the GPU's other queues.
    pub fn send(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError> {
        let peer = 1 - self.rank as c_int;
        self.exchange(&[(self.nccl.send, peer, regions)], limit).map_err(failed("sending to another GPU"))
    }

    /// Receives regions of memory. What they held is lost even if it fails.
    pub fn receive(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError> {
        let peer = 1 - self.rank as c_int;
        self.exchange(&[(self.nccl.receive, peer, regions)], limit).map_err(failed("receiving from another GPU"))
    }

    /// Sends regions of memory to other places of the same GPU's: all that a machine with one GPU can show of the two above.
    pub fn nccl_self_test(&self, from: &[Region], to: &[Region], limit: Duration) -> Result<(), CudaError> {
        let itself = self.rank as c_int;
        let both = [(self.nccl.send, itself, from), (self.nccl.receive, itself, to)];
        self.exchange(&both, limit).map_err(failed("sending to the same GPU"))
    }

    /// Returns when the regions have been sent to their peers, or received from them.
    fn exchange(&self, transfers: &[(TransferFn, c_int, &[Region])], limit: Duration) -> Result<(), NcclError> {
        let nccl = &self.nccl;
        let exchanged = self.with_handle(|handle| {
            let began = Instant::now();
            nccl.group(|| {
                let all =
                    transfers.iter().flat_map(|(one, peer, regions)| regions.iter().map(move |region| (one, *peer, region)));
                all.into_iter().try_for_each(|(one, peer, (address, bytes))| {
                    // SAFETY: communicator and stream are alive; the memory is the caller's until this returns.
                    #[expect(unsafe_code)]
                    nccl.check(unsafe { one(*address as *mut c_void, *bytes, UINT8, peer, handle, self.stream) })
                })
            })?;
            poll_until(began, limit, || nccl.ready(handle))?;
            poll_until(began, limit, || {
                // SAFETY: the stream is alive.
                #[expect(unsafe_code)]
                let state = unsafe { sys::cuStreamQuery(self.stream) };
                match state {
                    CUresult::CUDA_ERROR_NOT_READY => nccl.ready(handle).map(|_| false),
                    other => Ok(other.result().map(|()| true)?),
                }
            })
        });
        if exchanged.is_err() {
            self.abort_communicator();
            self.wait_until_idle();
        }
        exchanged
    }

    /// Returns when nothing runs any more, however long that takes: aborting need not wait for what is under way, and the caller will give the memory
    /// to others, which nothing must write to by then.
    fn wait_until_idle(&self) {
        let running = || {
            // SAFETY: the stream is alive.
            #[expect(unsafe_code)]
            let state = unsafe { sys::cuStreamQuery(self.stream) };
            state == CUresult::CUDA_ERROR_NOT_READY
        };
        // A device that has failed runs nothing.
        while self.context.enter().is_ok() && running() {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// With the communicator to itself, in its GPU's context.
    fn with_handle<T>(&self, calls: impl FnOnce(Handle) -> Result<T, NcclError>) -> Result<T, NcclError> {
        let handle = self.handle.lock().expect("no call panics");
        if handle.is_null() || self.context.enter().is_err() {
            return Err(NcclError::Broken);
        }
        calls(*handle)
    }

    /// Ends what runs, and all that will be asked for.
    fn abort_communicator(&self) {
        let handle = std::mem::replace(&mut *self.handle.lock().expect("no call panics"), null_mut());
        if !handle.is_null() && self.context.enter().is_ok() {
            let _locked = driver_lock_within_limit();
            // SAFETY: the communicator was alive, and nobody has it any more.
            #[expect(unsafe_code)]
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let handle = *self.handle.get_mut().expect("no call panics");
        if self.context.enter().is_err() {
            return;
        }
        // Destroying may wait for the other rank, unless both have ended what they had. Ranks of one process end one after the other, and what still
        // runs (if one's GPU was lost) must not be waited for.
        let ended = || {
            // SAFETY: the communicator is alive, and nobody asks anything of it any more.
            #[expect(unsafe_code)]
            self.nccl.check(unsafe { (self.nccl.finalize)(handle) })?;
            poll_until(Instant::now(), FINALIZE_MAX, || self.nccl.ready(handle))
        };
        let ends_itself = !handle.is_null() && !self.in_process && ended().is_ok();
        let _locked = driver_lock_within_limit();
        // SAFETY: communicator and stream are alive, nobody asks anything of them any more, and each is given back once. What NCCL and the driver
        // say to that changes nothing.
        #[expect(unsafe_code)]
        unsafe {
            if !handle.is_null() {
                let _ = if ends_itself { (self.nccl.destroy)(handle) } else { (self.nccl.abort)(handle) };
            }
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// One rank's numbers of four bytes in a sum, and the stream that has them.
pub(super) struct RankBuffer<'a> {
    pub communicator: &'a Communicator,
    pub stream: CUstream,
    pub address: u64,
}

/// Every rank's numbers become their sum over all ranks, in the order of each rank's stream. All ranks are of this process (`Communicator::all`).
pub(super) fn all_reduce_sum(buffers: &[RankBuffer<'_>], count: usize) -> Result<(), NcclError> {
    let Some(nccl) = buffers.first().map(|buffer| &buffer.communicator.nccl) else { return Ok(()) };
    let put = |buffer: &RankBuffer<'_>| {
        buffer.communicator.with_handle(|handle| {
            let numbers = buffer.address as *mut c_void;
            // SAFETY: communicator and stream are alive, and so is the memory until the stream has passed.
            #[expect(unsafe_code)]
            nccl.check(unsafe { (nccl.all_reduce)(numbers, numbers, count, FLOAT32, SUM, handle, buffer.stream) })
        })
    };
    // Engines of one process use the same GPUs: all of them get the sums in one order.
    let locked = driver_lock();
    let summed = nccl.group(|| buffers.iter().try_for_each(put));
    drop(locked);
    summed
        .and_then(|()| {
            buffers.iter().try_for_each(|buffer| buffer.communicator.with_handle(|handle| nccl.ready(handle)).map(drop))
        })
        .inspect_err(|_| buffers.iter().for_each(|buffer| buffer.communicator.abort_communicator()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_what_the_header_of_2_14_makes() {
        // SAFETY: it has no padding.
        #[expect(unsafe_code)]
        let bytes: [u8; 24] = unsafe { std::mem::transmute(Config::new(false)) };
        let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        assert_eq!([0, 4, 8, 12, 16, 20].map(number), [24, 0, 0xcafe_beef, 21_400, 0, 0x8000_0000]);
        assert_eq!(Config::new(true).blocking, 1);
    }

    #[test]
    fn a_library_that_is_missing_or_another_is_none() {
        assert!(Nccl::open("libnccl-is-not-here.so.2").is_none());
        assert!(Nccl::open("libc.so.6").is_none());
    }

    /// Both outcomes, as the machine has it: never a panic.
    #[test]
    fn without_the_library_the_error_says_what_to_install() {
        match Nccl::load() {
            Err(error) => {
                let told = error.to_string();
                assert!(told.contains("libnccl.so.2") && told.contains("nvidia-nccl-cu13"), "{told}");
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
    fn waiting_ends_with_success_an_error_or_the_limit() {
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
