//! Compiles the kernels with NVRTC, and caches the result on disk.
#![expect(unsafe_code, reason = "NVRTC is a C library")]

use super::{
    CompileTarget, CudaError,
    gpu::Driver,
    shape::{SOURCES, Shape},
};
use cudarc::nvrtc::{result, sys};
use std::{
    ffi::{CStr, CString},
    fs,
    path::{Path, PathBuf},
};
use xxhash_rust::xxh3::xxh3_128;

/// Returns the kernels' machine code for this model and GPU. If it is not in the cache, compiles it (in some ten seconds) and caches it.
/// Fails if NVRTC is not found or cannot compile the kernels.
pub(super) fn cubin(shape: &Shape, driver: &Driver, kernels_dir: Option<&Path>) -> Result<Vec<u8>, CudaError> {
    let architecture = driver.architecture();
    let Some(folder) = kernels_dir else { return compile(shape, &architecture) };
    let file = folder.join(format!("{}.cubin", key(shape, &architecture, driver.version)));
    if let Some(kept) = kept(&file) {
        return Ok(kept);
    }
    tracing::info!(%architecture, "compiling the kernels for this model and GPU; the result is cached");
    let code = compile(shape, &architecture)?;
    if let Err(error) = keep(folder, &file, &code) {
        tracing::warn!(folder = %folder.display(), %error, "cannot cache the compiled kernels; every start will compile them");
    }
    Ok(code)
}

/// Compiles the kernels for this model and a GPU that need not be present. Returns the file in the cache.
pub(super) fn cubin_for(shape: &Shape, target: &CompileTarget<'_>, folder: &Path) -> Result<PathBuf, CudaError> {
    let CompileTarget { architecture, driver_version, .. } = *target;
    let file = folder.join(format!("{}.cubin", key(shape, architecture, driver_version)));
    if kept(&file).is_none() {
        let code = compile(shape, architecture)?;
        keep(folder, &file, &code).map_err(|error| CudaError::Compile { log: error.to_string() })?;
    }
    Ok(file)
}

/// Returns the cache key: a hash of all inputs that determine the machine code.
fn key(shape: &Shape, architecture: &str, driver_version: i32) -> String {
    let mut text = format!("{architecture} {driver_version} {:?}", options(shape, architecture));
    SOURCES.iter().for_each(|(_, source)| text.push_str(source));
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

/// Reads the code from a cached file, whose first 16 bytes are the hash of the rest. Returns `None` if the file is absent, incomplete or
/// damaged.
fn kept(file: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(file).ok()?;
    let hash = u128::from_le_bytes(*bytes.first_chunk::<16>()?);
    let code = bytes.split_off(16);
    (xxh3_128(&code) == hash).then_some(code)
}

/// Writes the file under a temporary name and then renames it, so that a reader never sees an incomplete file.
fn keep(folder: &Path, file: &Path, code: &[u8]) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    let unfinished = file.with_extension(format!("{}.part", std::process::id()));
    fs::write(&unfinished, [&xxh3_128(code).to_le_bytes(), code].concat())?;
    fs::rename(&unfinished, file)
}

fn options(shape: &Shape, architecture: &str) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={architecture}"), "--std=c++17".to_owned()];
    options.extend(shape.definitions());
    options
}

/// Compiles the kernels with NVRTC, which needs no GPU.
pub(super) fn compile(shape: &Shape, architecture: &str) -> Result<Vec<u8>, CudaError> {
    // SAFETY: the call only tries to open the library, which runs nothing but the library's own initialisers.
    let present = unsafe { sys::is_culib_present() };
    if !present {
        return Err(CudaError::NoLibrary { library: "libnvrtc.so.13", package: "nvidia-cuda-nvrtc" });
    }
    let failed = |log: String| CudaError::Compile { log };
    let lines = SOURCES.map(|(name, source)| format!("#line 1 \"{name}\"\n{source}"));
    let source = CString::new(lines.concat()).expect("the sources contain no NUL");
    let program = result::create_program(&source, None).map_err(|error| failed(error.to_string()))?;
    let code = compiled(program, &options(shape, architecture));
    // SAFETY: the program was created above, is destroyed once, and is not used afterwards.
    let destroyed = unsafe { result::destroy_program(program) };
    destroyed.map_err(|error| failed(error.to_string()))?;
    code.map_err(failed)
}

/// Compiles a program; the error is NVRTC's log.
fn compiled(program: sys::nvrtcProgram, options: &[String]) -> Result<Vec<u8>, String> {
    let text = |error: result::NvrtcError| error.to_string();
    // SAFETY: the caller created the program and has not destroyed it; NVRTC fills buffers of the sizes it reported, and a log ends with a
    // NUL.
    unsafe {
        if let Err(error) = result::compile_program(program, options) {
            let log = result::get_program_log(program).map_err(text)?;
            let log = CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned();
            return Err(if log.is_empty() { text(error) } else { log });
        }
        let mut len = 0;
        sys::nvrtcGetCUBINSize(program, &mut len).result().map_err(text)?;
        let mut code = vec![0u8; len];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result().map_err(text)?;
        Ok(code)
    }
}

#[cfg(test)]
mod resources;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::shape::Half;
    use std::io::Write;
    use tandem_model::Pairs;

    pub(super) const QWEN3_8B: Shape = Shape {
        half: Half::BFloat16,
        layers: 36,
        width: 4_096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 12_288,
        vocab_size: 151_936,
        block_size: 16,
        pairs: Pairs::Halves,
        small_shared_memory: false,
    };

    /// Checks that the code begins with ELF's magic number, and that the symbol table names every kernel.
    fn check(code: &[u8]) {
        assert_eq!(&code[..4], b"\x7fELF");
        for kernel in crate::cuda::device::Kernel::ALL {
            let name = [kernel.name().as_bytes(), b"\0"].concat();
            assert!(code.windows(name.len()).any(|window| window == name), "{} is missing", kernel.name());
        }
    }

    /// Returns whether the tests can compile kernels. Panics if `TANDEM_NVRTC` is set and NVRTC is not found.
    pub(super) fn nvrtc_is_present() -> bool {
        // SAFETY: as in `compile`.
        let present = unsafe { sys::is_culib_present() };
        assert!(present || std::env::var_os("TANDEM_NVRTC").is_none(), "TANDEM_NVRTC is set, but libnvrtc is not found");
        present
    }

    #[test]
    fn all_kernels_compile_for_every_architecture() {
        if !nvrtc_is_present() {
            let skipped = "SKIPPED: no NVRTC; ci/test.sh fetches it (its part `nvrtc`)";
            writeln!(std::io::stderr(), "{skipped}").unwrap();
            return;
        }
        for architecture in ["sm_80", "sm_90", "sm_100"] {
            check(&compile(&QWEN3_8B, architecture).unwrap());
        }
        let llama = Shape { half: Half::Float16, heads: 9, kv_heads: 3, head_dim: 64, pairs: Pairs::Adjacent, ..QWEN3_8B };
        check(&compile(&llama, "sm_90").unwrap());
        check(&compile(&Shape { small_shared_memory: true, ..QWEN3_8B }, "sm_89").unwrap());
        let error = compile(&QWEN3_8B, "sm_1").expect_err("the device architecture is unknown").to_string();
        assert!(error.contains("cannot compile the kernels"), "{error}");
    }

    #[test]
    fn cache_returns_stored_code_and_ignores_damaged_files() {
        let folder = tempfile::tempdir().unwrap();
        let (inner, code) = (folder.path().join("kernels"), vec![7; 1_000]);
        let file = inner.join("a.cubin");
        assert_eq!(kept(&file), None);
        keep(&inner, &file, &code).unwrap();
        assert_eq!(kept(&file), Some(code));
        assert_eq!(fs::read_dir(&inner).unwrap().count(), 1, "no unfinished file is left");
        let mut damaged = fs::read(&file).unwrap();
        damaged[500] ^= 1;
        for bytes in [&damaged[..], &damaged[..600], &damaged[..3]] {
            fs::write(&file, bytes).unwrap();
            assert_eq!(kept(&file), None);
        }
    }

    #[test]
    fn cache_key_depends_on_shape_architecture_and_driver() {
        let other = Shape { head_dim: 64, ..QWEN3_8B };
        let keys = [
            key(&QWEN3_8B, "sm_90", 13_000),
            key(&other, "sm_90", 13_000),
            key(&QWEN3_8B, "sm_80", 13_000),
            key(&QWEN3_8B, "sm_90", 12_080),
        ];
        for (i, key) in keys.iter().enumerate() {
            assert!(!keys[..i].contains(key));
        }
        assert_eq!(key(&QWEN3_8B, "sm_90", 13_000), keys[0]);
    }
}
