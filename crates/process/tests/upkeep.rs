//! Tests that the memory of histograms does not grow between scrapes. The test has its own process, because it counts all of the process's
//! allocations.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};
use tandem_process::Metrics;

/// The system's allocator, with a count of the bytes in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: every call is passed on unchanged to the system's allocator. Counting bytes allocates no memory.
#[expect(unsafe_code, reason = "the allocator's trait is unsafe")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `alloc`, which is the same for the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller fulfils the contract of `dealloc`, which is the same for the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[tokio::test(start_paused = true)]
async fn upkeep_bounds_the_memory_of_histograms_that_are_not_scraped() {
    const VALUES: usize = 100_000;
    let metrics = Metrics::default();
    let histogram = metrics.histogram("tandem_frontend_inter_token_latency_seconds", "Gaps.", &[]);
    let mut upkeep = tokio::task::JoinSet::new();
    upkeep.spawn(metrics.upkeep());
    let mut early = 0;
    for round in 0..40 {
        (0..VALUES).for_each(|value| histogram.record(value as f64));
        tokio::time::sleep(Duration::from_secs(2)).await;
        if round == 4 {
            early = IN_USE.load(Ordering::Relaxed);
        }
    }
    let grown = IN_USE.load(Ordering::Relaxed).saturating_sub(early);
    assert!(grown < 10 * VALUES * size_of::<f64>(), "{grown} bytes more than after 5 of 40 rounds");
}
