//! Prefetches memory into the processor's cache.

/// Begins to read the item at this position, if there is one, into the processor's cache. Several such reads overlap,
/// whereas searches wait for one read after another.
#[inline]
pub(super) fn prefetch<T>(items: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(item) = items.get(at) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        #[expect(unsafe_code, reason = "the standard library has no safe function for prefetching")]
        // SAFETY: a prefetch changes no memory and cannot fail, whatever the address. This address is that of an item.
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(item).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (items, at);
}
