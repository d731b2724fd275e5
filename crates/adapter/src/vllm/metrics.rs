//! Reads constants and the load of an engine from vLLM's page `/metrics`.

use crate::engine_load::ObservedLoad;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct EngineConstants {
    pub block_size: u32,
    /// The number of blocks in the device's memory. vLLM never uses the first block.
    pub blocks: u32,
    /// The number of tokens that fit into the device's memory, if the engine reports it. The groups of layers of a hybrid model share the blocks,
    /// so that fewer tokens fit than `blocks` suggests.
    pub tokens: Option<u64>,
    /// Whether the engine reuses the KV of prompts with equal prefixes.
    pub prefix_caching: bool,
    /// The data type of the cached KV.
    pub cache_dtype: String,
    /// The time at which the server started, in seconds since 1970. It identifies an instance of the server.
    pub started: f64,
}

impl EngineConstants {
    pub fn parse(metrics: &str, rank: u32) -> Option<Self> {
        let labels = samples(metrics, "vllm:cache_config_info")
            .map(|(labels, _)| labels)
            .find(|labels| label(labels, "engine").is_none_or(|engine| engine == rank.to_string()))?;
        Some(Self {
            block_size: label(labels, "block_size")?.parse().ok().filter(|size| *size > 0)?,
            blocks: label(labels, "num_gpu_blocks")?.parse().ok()?,
            tokens: label(labels, "kv_cache_size_tokens").and_then(|tokens| tokens.parse().ok()),
            prefix_caching: label(labels, "enable_prefix_caching").is_none_or(|value| value == "True"),
            cache_dtype: label(labels, "cache_dtype").unwrap_or("auto").to_owned(),
            started: started(metrics).unwrap_or(0.0),
        })
    }

    /// Whether several groups of layers share the engine's blocks, so that fewer tokens fit than the blocks suggest. For a cache hit, such
    /// an engine would report all blocks for every group, even those that a group does not hold, so it must not report hits. Groups that
    /// lower the capacity by 5 % or less are not detected; the mirror then counts only blocks that the groups hold in any case.
    pub fn has_groups(&self) -> bool {
        let of_blocks = u64::from(self.blocks) * u64::from(self.block_size);
        self.tokens.is_some_and(|tokens| tokens * 20 < of_blocks * 19)
    }

    /// Returns the number of tokens that fit into the engine's blocks: all except the first.
    pub fn capacity_tokens(&self) -> u64 {
        let of_blocks = u64::from(self.blocks.saturating_sub(1)) * u64::from(self.block_size);
        self.tokens.map_or(of_blocks, |tokens| tokens.min(of_blocks))
    }
}

/// Returns the data-parallel ranks of the server, in order, each with the number of tokens that fit into its KV memory.
pub(super) fn ranks(metrics: &str) -> Vec<(u32, u64)> {
    let named = samples(metrics, "vllm:cache_config_info");
    let mut ranks: Vec<u32> = named.filter_map(|(labels, _)| label(labels, "engine").unwrap_or("0").parse().ok()).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let constants = ranks.into_iter().filter_map(|rank| Some((rank, EngineConstants::parse(metrics, rank)?)));
    constants.map(|(rank, constants)| (rank, constants.capacity_tokens())).collect()
}

/// The load that a rank reports, and sums since its start from which its rates follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RankReport {
    running: f64,
    waiting: f64,
    /// The used part of the KV memory, from 0 to 1.
    kv_usage: f64,
    /// The prompt tokens that were computed, and the time of their prefills.
    computed_tokens: f64,
    prefill_s: f64,
    /// The number of intervals between two tokens of an answer, and their time.
    intervals: f64,
    intervals_s: f64,
}

/// The prefill rate is measured only over at least this many computed tokens. With fewer, other costs dominate the time.
const MEASURED_TOKENS_MIN: f64 = 256.0;

impl RankReport {
    /// Returns the report of a rank; `None` if the page has no numbers of requests.
    pub fn parse(metrics: &str, rank: u32) -> Option<Self> {
        let rank = rank.to_string();
        let sum = |name: &str| {
            let of_rank =
                samples(metrics, name).filter(|(labels, _)| label(labels, "engine").is_none_or(|engine| engine == rank));
            of_rank.filter_map(|(_, value)| value.parse::<f64>().ok()).reduce(|sum, value| sum + value)
        };
        let total = |name: &str| sum(name).unwrap_or(0.0);
        Some(Self {
            running: sum("vllm:num_requests_running")?,
            waiting: sum("vllm:num_requests_waiting")?,
            kv_usage: total("vllm:kv_cache_usage_perc"),
            computed_tokens: total("vllm:request_prefill_kv_computed_tokens_sum"),
            prefill_s: total("vllm:request_prefill_time_seconds_sum"),
            intervals: total("vllm:inter_token_latency_seconds_count"),
            intervals_s: total("vllm:inter_token_latency_seconds_sum"),
        })
    }

    /// Returns the load now, with the rates since the report `before`. `capacity_tokens` tokens fit into the KV memory.
    pub fn load(&self, before: &Self, capacity_tokens: u64) -> ObservedLoad {
        let computed = self.computed_tokens - before.computed_tokens;
        let is_measured = |value: &f64| value.is_finite() && *value > 0.0;
        let prefill = (computed >= MEASURED_TOKENS_MIN).then(|| computed / (self.prefill_s - before.prefill_s));
        let step = (self.intervals > before.intervals)
            .then(|| (self.intervals_s - before.intervals_s) * 1e3 / (self.intervals - before.intervals));
        ObservedLoad {
            running: self.running as u32,
            waiting: self.waiting as u32,
            tokens: (self.kv_usage.clamp(0.0, 1.0) * capacity_tokens as f64) as u64,
            prefill_tokens_per_second: prefill.filter(is_measured),
            decode_step_ms: step.filter(is_measured),
        }
    }
}

pub(super) fn started(metrics: &str) -> Option<f64> {
    samples(metrics, "process_start_time_seconds").find_map(|(_, value)| value.parse().ok())
}

/// Returns the samples of the metric `name`. Each sample consists of the text of its labels and the text of its value.
fn samples<'a>(metrics: &'a str, name: &str) -> impl Iterator<Item = (&'a str, &'a str)> {
    metrics.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        match rest.strip_prefix('{') {
            Some(rest) => rest.rsplit_once("} "),
            None => rest.strip_prefix(' ').map(|value| ("", value)),
        }
    })
}

/// Returns the value of a label; `None` if there is no such label. Escaped characters in values are not supported.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    let start = labels
        .match_indices(name)
        .find(|(at, _)| (*at == 0 || labels.as_bytes()[at - 1] == b',') && labels[at + name.len()..].starts_with("=\""))?;
    labels[start.0 + name.len() + 2..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An excerpt of a recorded metrics page of vLLM 0.32.
    const METRICS: &str = r#"# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79538511919e+09
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",effective_attention_block_size="16",enable_prefix_caching="True",engine="0",kv_cache_dtype_skip_layers="[]",num_gpu_blocks="256"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="False",engine="1",kv_cache_size_tokens="1522",num_gpu_blocks="200"} 1.0
"#;

    fn page(running: &str, tokens: u32, seconds: f64, intervals: u32) -> String {
        let labels = r#"engine="0",model_name="m""#;
        format!(
            "vllm:num_requests_running{{{labels}}} {running}\nvllm:num_requests_running{{engine=\"1\",model_name=\"m\"}} 50.0\n\
             vllm:num_requests_waiting{{{labels}}} 2.0\nvllm:num_requests_waiting_by_reason{{{labels},reason=\"x\"}} 9.0\n\
             vllm:kv_cache_usage_perc{{{labels}}} 0.25\nvllm:request_prefill_kv_computed_tokens_sum{{{labels}}} {tokens}.0\n\
             vllm:request_prefill_time_seconds_sum{{{labels}}} {seconds}\n\
             vllm:inter_token_latency_seconds_count{{{labels}}} {intervals}.0\nvllm:inter_token_latency_seconds_sum{{{labels}}} {}\n",
            f64::from(intervals) * 0.02
        )
    }

    #[test]
    fn load_of_an_observed_rank_is_its_report_with_the_rates_since_the_last_one() {
        let report = |page: &str| RankReport::parse(page, 0).expect("the page has the numbers of requests");
        let first = report(&page("3.0", 1_000, 1.0, 100));
        let idle = ObservedLoad { running: 3, waiting: 2, tokens: 1_000, ..ObservedLoad::default() };
        assert_eq!(first.load(&first, 4_000), idle, "nothing was measured");
        let load = report(&page("4.0", 3_000, 1.5, 200)).load(&first, 4_000);
        assert_eq!((load.running, load.prefill_tokens_per_second), (4, Some(4_000.0)));
        assert!(load.decode_step_ms.is_some_and(|step| (step - 20.0).abs() < 1e-6), "{load:?}");
        // Few tokens, a restarted server, and numbers that no engine has.
        for (hostile, running) in [
            (page("4.0", 1_255, 1.5, 100), 4),
            (page("4.0", 9_000, 1.0, 1), 4),
            (page("NaN", 0, f64::NAN, 0), 0),
            (page("1e300", 0, f64::INFINITY, 0), u32::MAX),
        ] {
            let load = report(&hostile).load(&first, 4_000);
            assert_eq!((load.running, load.prefill_tokens_per_second, load.decode_step_ms), (running, None, None), "{hostile}");
        }
        assert_eq!(RankReport::parse(METRICS, 0), None);
    }

    #[test]
    fn engine_constants_are_parsed_for_each_rank() {
        let first = EngineConstants::parse(METRICS, 0).expect("the page has the metrics of rank 0");
        let expected = EngineConstants {
            block_size: 32,
            blocks: 256,
            tokens: None,
            prefix_caching: true,
            cache_dtype: "auto".to_owned(),
            started: 1_795_385_119.19,
        };
        assert_eq!(first, expected);
        let second = EngineConstants::parse(METRICS, 1).expect("the page has the metrics of rank 1");
        assert_eq!((second.blocks, second.prefix_caching), (200, false));
        assert_eq!((first.has_groups(), second.has_groups()), (false, true));
        assert_eq!(EngineConstants::parse(METRICS, 2), None);
        assert_eq!(ranks(METRICS), [(0, 255 * 32), (1, 1522)]);
        assert_eq!(ranks(""), []);
        assert_eq!(EngineConstants::parse("", 0), None);
    }
}
