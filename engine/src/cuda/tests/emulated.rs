//! A GPU that is this host: kernels built with g++, products in double precision.

use super::*;
use crate::cuda::device::{Factors, Into, Product};
use half::{bf16, f16};
use libloading::Library;
use std::{
    collections::HashMap,
    ffi::{CString, c_void},
    path::Path,
    process::Command,
    sync::Mutex,
};

type LaunchKernel = unsafe extern "C" fn(*const i8, *const u32, u32, u32, *mut *mut c_void, u32) -> bool;

/// Threads and blocks first to last or last to first (1), asynchronous copies as late as may be or at once (2).
pub(super) const ORDERS: [u32; 4] = [0, 1, 2, 3];

pub(super) struct Emulated {
    library: Arc<Library>,
    order: u32,
    /// Sizes of what was taken and not given back, by address.
    taken: Arc<Mutex<HashMap<u64, usize>>>,
}

/// The kernels for a shape, built once a process.
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
    assert!(compiled.status.success(), "g++ refuses the kernels:\n{}", String::from_utf8_lossy(&compiled.stderr));
    // SAFETY: the library is ours and has no initialisers.
    #[expect(unsafe_code)]
    let library = Arc::new(unsafe { Library::new(&file) }.unwrap());
    built.push((definitions, Arc::clone(&library)));
    library
}

impl Emulated {
    pub fn new(shape: &Shape, order: u32) -> Self {
        Self { library: library(shape), order, taken: Arc::default() }
    }

    /// Bytes that are taken and not given back.
    pub fn taken_bytes(&self) -> usize {
        self.taken.lock().unwrap().values().sum()
    }

    /// PROMPT_ROWS, PROMPT_BYTES, TOKEN_ROWS, TOKEN_BYTES, as the kernels have them.
    pub fn constants(&self) -> [u32; 4] {
        let mut constants = [0; 4];
        // SAFETY: the function has this type, and fills four numbers.
        #[expect(unsafe_code)]
        unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn(*mut u32)> = self.library.get(b"constants").unwrap();
            function(constants.as_mut_ptr());
        }
        constants
    }

    fn check(&self, address: u64, len: usize) {
        let taken = self.taken.lock().unwrap();
        let inside = taken.iter().any(|(start, bytes)| *start <= address && address + len as u64 <= start + *bytes as u64);
        assert!(inside, "{len} bytes at {address:#x} are not of one piece of memory");
    }

    fn read(&self, address: u64, into: &mut [u8]) {
        self.check(address, into.len());
        // SAFETY: the bytes are of memory that was taken and not given back, and tests use a device from one thread.
        #[expect(unsafe_code)]
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, into.as_mut_ptr(), into.len());
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.check(address, bytes.len());
        // SAFETY: as above.
        #[expect(unsafe_code)]
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
    fn beside(&self) -> Result<Self, CudaError> {
        Ok(Self { library: Arc::clone(&self.library), order: self.order, taken: Arc::clone(&self.taken) })
    }

    fn processors(&self) -> usize {
        3
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        Ok((64 << 20) - self.taken_bytes())
    }

    fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        // SAFETY: the function has this type.
        #[expect(unsafe_code)]
        let address = unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn(usize) -> u64> = self.library.get(b"allocate").unwrap();
            function(bytes)
        };
        assert_ne!(address, 0, "the host has no memory left");
        self.taken.lock().unwrap().insert(address, bytes);
        Ok(address)
    }

    fn free(&self, address: u64) {
        let bytes = self.taken.lock().unwrap().remove(&address).expect("memory is given back once");
        // SAFETY: the function has this type, and the memory was taken with this size.
        #[expect(unsafe_code)]
        unsafe {
            let function: libloading::Symbol<'_, unsafe extern "C" fn(u64, usize)> = self.library.get(b"release").unwrap();
            function(address, bytes);
        }
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.write(to, bytes);
        Ok(())
    }

    fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.read(from, into);
        Ok(())
    }

    fn wait(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.upload(to, &self.read_all(from, bytes))
    }

    fn launch(&self, launch: Launch, arguments: &mut [u64]) -> Result<(), CudaError> {
        let grid = launch.grid.map(|blocks| blocks as u32);
        assert!(grid[0] > 0 && (1..=65_535).contains(&grid[1]) && (1..=65_535).contains(&grid[2]), "{launch:?} is no grid");
        let name = CString::new(launch.kernel.name()).unwrap();
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
        // SAFETY: the function has this type; it reads the arguments that the kernel of this name has.
        #[expect(unsafe_code)]
        let known = unsafe {
            let function: libloading::Symbol<'_, LaunchKernel> = self.library.get(b"launch").unwrap();
            let (threads, shared) = (launch.kernel.threads(), launch.shared_bytes as u32);
            function(name.as_ptr().cast(), grid.as_ptr(), threads, shared, pointers.as_mut_ptr(), self.order)
        };
        assert!(known, "there is no kernel {}", launch.kernel.name());
        Ok(())
    }

    fn multiply(&self, half: Half, product: Product, factors: Factors) -> Result<(), CudaError> {
        let Product { rows, inputs, outputs, into } = product;
        let weights = widened(half, &self.read_all(factors.weights, outputs * inputs * 2));
        let all = widened(half, &self.read_all(factors.inputs, rows * inputs * 2));
        let bytes = if into == Into::Halves { 2 } else { 4 };
        let mut all_out = self.read_all(factors.outputs, rows * outputs * bytes);
        for (row, out) in all.chunks_exact(inputs).zip(all_out.chunks_exact_mut(outputs * bytes)) {
            for (weights, out) in weights.chunks_exact(inputs).zip(out.chunks_exact_mut(bytes)) {
                let sum = weights.iter().zip(row).map(|(weight, input)| weight * input).sum::<f64>() as f32;
                match into {
                    Into::Halves => out.copy_from_slice(&narrow(half, sum)),
                    Into::Singles => out.copy_from_slice(&sum.to_le_bytes()),
                    Into::Sum => {
                        let before = f32::from_le_bytes(out.try_into().unwrap());
                        out.copy_from_slice(&(before + sum).to_le_bytes());
                    }
                }
            }
        }
        self.write(factors.outputs, &all_out);
        Ok(())
    }
}
