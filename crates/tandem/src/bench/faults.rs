//! The faults of `tandem bench simulate`.

use super::positive;
use anyhow::{Context, Result};
use clap::Args;
use std::{str::FromStr, time::Duration};
use tandem_simulator::{Faults, Loss, RandomLosses, SimulatedCluster};

/// Workers that are lost or slow.
#[derive(Args, Debug)]
#[command(next_help_heading = "Faults")]
pub struct FaultArgs {
    /// Losses of workers, separated by commas: the worker, when it is lost, and after which time it is back, with an empty cache [default:
    /// never]. Times are in virtual seconds. Example: `worker-0@60+30`
    #[arg(long, value_name = "WORKER@AT[+FOR]", value_delimiter = ',', conflicts_with = "plan")]
    lose: Vec<LossArg>,
    /// Mean time between losses of random workers, at times that --seed determines
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    lose_every: Option<f64>,
    /// Time for which workers that are lost at random are absent
    #[arg(long, value_name = "SECONDS", value_parser = positive, default_value_t = 30.0, requires = "lose_every")]
    lost_for: f64,
    /// Workers that are slower than their device by a factor, separated by commas. Example: `worker-0=4`
    #[arg(long, value_name = "WORKER=FACTOR", value_delimiter = ',', conflicts_with = "plan")]
    slow: Vec<SlowArg>,
}

#[derive(Clone, Debug, PartialEq)]
struct LossArg {
    worker: String,
    at: Duration,
    lasts: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq)]
struct SlowArg {
    worker: String,
    factor: f64,
}

impl FaultArgs {
    /// Whether any worker is lost or slow.
    pub fn is_set(&self) -> bool {
        !self.lose.is_empty() || self.lose_every.is_some() || !self.slow.is_empty()
    }

    /// Returns the cluster with these faults.
    ///
    /// # Errors
    /// A fault names a worker that the cluster does not have.
    pub fn apply(&self, mut cluster: SimulatedCluster) -> Result<SimulatedCluster> {
        let names: Vec<String> = cluster.worker_names().collect();
        let number = |flag: &str, name: &str| {
            let found = names.iter().position(|other| other == name);
            found.with_context(|| format!("--{flag}: there is no worker {name}; the workers are {}", ranges(&cluster)))
        };
        let losses = self.lose.iter().map(|loss| {
            let LossArg { worker, at, lasts } = loss;
            Ok(Loss { worker: number("lose", worker)?, at: *at, lasts: *lasts })
        });
        let losses = losses.collect::<Result<_>>()?;
        let slow = self.slow.iter().map(|slow| Ok((number("slow", &slow.worker)?, slow.factor)));
        let slow = slow.collect::<Result<Vec<_>>>()?;
        slow.into_iter().for_each(|(number, factor)| cluster.workers[number].slower = factor);
        let random = self.lose_every.map(|every| {
            let time = |flag: &str, seconds: f64| {
                Duration::try_from_secs_f64(seconds).with_context(|| format!("--{flag}: write a smaller number of seconds"))
            };
            Ok::<_, anyhow::Error>(RandomLosses { every: time("lose-every", every)?, lasts: time("lost-for", self.lost_for)? })
        });
        Ok(SimulatedCluster { faults: Faults { losses, random: random.transpose()? }, ..cluster })
    }
}

/// Returns the names of the workers as ranges.
fn ranges(cluster: &SimulatedCluster) -> String {
    let names: Vec<String> = cluster.worker_names().collect();
    let kind = |name: &str| name.split('-').next().unwrap_or_default().to_owned();
    let ranges = names.chunk_by(|one, other| kind(one) == kind(other)).map(|chunk| match chunk {
        [only] => only.clone(),
        several => format!("{} to {}", several[0], several[several.len() - 1]),
    });
    ranges.collect::<Vec<_>>().join(", ")
}

fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or("write times as numbers of seconds, as in worker-0@60+30")
}

impl FromStr for LossArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (worker, times) = text.split_once('@').ok_or("write a worker, @ and a time, as in worker-0@60+30")?;
        let (at, lasts) = times.split_once('+').map_or((times, None), |(at, lasts)| (at, Some(lasts)));
        Ok(Self { worker: worker.to_owned(), at: seconds(at)?, lasts: lasts.map(seconds).transpose()? })
    }
}

impl FromStr for SlowArg {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (worker, factor) = text.split_once('=').ok_or("write a worker, = and a factor, as in worker-0=4")?;
        Ok(Self { worker: worker.to_owned(), factor: positive(factor)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_parsed_with_worker_time_and_optional_duration() {
        let loss = |worker: &str, at, lasts: Option<u64>| LossArg {
            worker: worker.to_owned(),
            at: Duration::from_secs(at),
            lasts: lasts.map(Duration::from_secs),
        };
        assert_eq!("worker-0@60+30".parse(), Ok(loss("worker-0", 60, Some(30))));
        assert_eq!("decode-12@0".parse(), Ok(loss("decode-12", 0, None)));
        for wrong in ["worker-0", "worker-0@", "worker-0@soon", "worker-0@-1", "worker-0@1+", "worker-0@1+x", "worker-0@inf"] {
            assert!(wrong.parse::<LossArg>().is_err(), "{wrong}");
        }
        for wrong in ["worker-0", "worker-0=", "worker-0=0", "worker-0=-1"] {
            assert!(wrong.parse::<SlowArg>().is_err(), "{wrong}");
        }
    }
}
