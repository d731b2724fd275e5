//! `tandem plan --live` and `tandem drain`: how many workers the load of a running cluster needs, and one worker less.

use crate::{router_connection::RouterAddress, text_table::text_table};
use anyhow::{Context, Result, anyhow, bail, ensure};
use tandem_proto::v1::{WantedWorkers, WorkerView, WorkersReply};

/// The arguments of `tandem plan`.
#[derive(clap::Args, Debug)]
pub struct LivePlanArgs {
    /// Read the plan of a running cluster's router. For a cluster that does not exist yet, use `tandem bench simulate --plan`
    #[arg(long, required = true)]
    live: bool,
    /// The router.
    #[command(flatten)]
    router: RouterAddress,
}

/// The arguments of `tandem drain`.
#[derive(clap::Args, Debug)]
pub struct DrainArgs {
    /// Id of the worker, as `tandem top` shows it [default: if there are more workers than wanted, the one whose loss costs least]
    #[arg(long, value_name = "ID")]
    worker: Option<String>,
    /// The router.
    #[command(flatten)]
    router: RouterAddress,
}

/// Returns the numbers of workers that a running cluster's load needs, as a table with the reasons.
///
/// # Errors
/// Fails if the router does not answer, or if it has no service levels.
pub fn plan(args: &LivePlanArgs) -> Result<String> {
    let LivePlanArgs { live: _, router } = args;
    let reply = router.open("tandem plan --live")?.view()?;
    planned(&reply)
}

fn planned(reply: &WorkersReply) -> Result<String> {
    ensure!(!reply.wanted.is_empty(), "{}", why_nothing_is_planned(reply));
    let mut rows = vec![["model", "role", "wanted", "present", "first to lose"].map(str::to_owned).to_vec()];
    let mut reasons = String::new();
    for of in &reply.wanted {
        let WantedWorkers { model, wanted, present, reason, cheapest_to_lose, .. } = of;
        let role = of.role().name();
        let first = cheapest_to_lose.clone().unwrap_or_else(|| "-".to_owned());
        rows.push(vec![model.clone(), role.to_owned(), wanted.to_string(), present.to_string(), first]);
        reasons += &format!("\n{model}, {role}: {reason}");
    }
    Ok(format!("{}{reasons}\n", text_table(rows, 2)))
}

fn why_nothing_is_planned(reply: &WorkersReply) -> &'static str {
    if !reply.has_service_levels {
        "this router has no service levels: start `tandem router` or `tandem up` with --slo-ttft MS or --slo-itl MS"
    } else if reply.workers.is_empty() {
        "no worker is there: none has joined this router, or all have been lost (`tandem top` shows the reasons)"
    } else {
        "this router has not planned yet, because it has just started: try again in 15 seconds"
    }
}

/// Makes a worker drain and end, and returns what happens next.
///
/// # Errors
/// Fails if the router does not answer or is a part of `tandem up`, if no worker is to be drained, or if the worker refuses.
pub fn drain(args: &DrainArgs) -> Result<String> {
    let mut router = args.router.open("tandem drain")?;
    ensure!(!router.of_up, "the workers of `tandem up` are parts of one process, and cannot be drained; stop it instead");
    let reply = router.view()?;
    let worker = chosen(&reply, args.worker.as_deref())?;
    let info = worker.info.as_ref().context("the router names a worker without a description")?;
    router.drain(&worker.address, &info.instance_id)?;
    Ok(format!(
        "{} gets no further requests and ends when its running ones have ended: {} now. After that, `tandem top` shows it as unreachable if \
         the router has it in a list (--workers).\n",
        info.worker_id, worker.bookings
    ))
}

/// Returns the worker to drain: the named one, or the one whose loss costs least where more workers are present than wanted.
fn chosen<'a>(reply: &'a WorkersReply, named: Option<&str>) -> Result<&'a WorkerView> {
    let id = match named {
        Some(id) => id,
        None => {
            ensure!(!reply.wanted.is_empty(), "{}; or name a worker with --worker", why_nothing_is_planned(reply));
            let spare = reply.wanted.iter().filter(|of| of.present > of.wanted);
            let most = spare.max_by_key(|of| of.present - of.wanted);
            most.and_then(|of| of.cheapest_to_lose.as_deref()).ok_or_else(|| {
                anyhow!("no more workers are present than wanted (see `tandem plan --live`); to drain one nevertheless, name it with --worker")
            })?
        }
    };
    let is_it = |worker: &&WorkerView| worker.info.as_ref().is_some_and(|info| info.worker_id == id);
    match reply.workers.iter().find(is_it) {
        Some(worker) => Ok(worker),
        None => {
            let mut ids =
                reply.workers.iter().filter_map(|worker| Some(worker.info.as_ref()?.worker_id.clone())).collect::<Vec<_>>();
            ids.sort();
            bail!("the router has no worker {id}; its workers are {}", ids.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::{WorkerInfo, worker_info::Role};

    fn reply(wanted: &[(u32, u32)]) -> WorkersReply {
        let of = |&(wanted, present): &(u32, u32)| WantedWorkers {
            model: "m".to_owned(),
            role: Role::Decode.into(),
            wanted,
            present,
            reason: "3.00 prompts/s".to_owned(),
            cheapest_to_lose: Some("d1".to_owned()),
        };
        let worker = |id: &str| WorkerView {
            info: Some(WorkerInfo { worker_id: id.to_owned(), ..Default::default() }),
            ..Default::default()
        };
        WorkersReply { wanted: wanted.iter().map(of).collect(), workers: vec![worker("d0"), worker("d1")], ..Default::default() }
    }

    fn drained(reply: &WorkersReply, named: Option<&str>) -> Result<String, String> {
        let worker = chosen(reply, named).map_err(|error| error.to_string())?;
        Ok(worker.info.clone().unwrap_or_default().worker_id)
    }

    #[test]
    fn plan_names_the_numbers_and_the_reasons() {
        let plan = planned(&reply(&[(3, 2)])).expect("the router has a plan");
        assert!(plan.contains("wanted") && plan.contains("m, decode: 3.00 prompts/s"), "{plan}");
    }

    #[test]
    fn missing_plan_names_its_cause() {
        let cause = |reply| planned(&reply).expect_err("there is no plan").to_string();
        assert!(cause(WorkersReply::default()).contains("--slo-ttft"));
        assert!(cause(reply(&[])).contains("--slo-ttft"));
        assert!(cause(WorkersReply { has_service_levels: true, ..Default::default() }).contains("no worker is there"));
        assert!(cause(WorkersReply { has_service_levels: true, ..reply(&[]) }).contains("has not planned yet"));
    }

    #[test]
    fn worker_that_is_cheapest_to_lose_is_drained_only_if_one_is_spare() {
        assert_eq!(drained(&reply(&[(1, 2)]), None).as_deref(), Ok("d1"));
        assert!(drained(&reply(&[(2, 2)]), None).is_err_and(|error| error.contains("no more workers are present than wanted")));
        assert!(drained(&reply(&[]), None).is_err_and(|error| error.contains("--slo-ttft") && error.contains("--worker")));
        assert_eq!(drained(&reply(&[(2, 2)]), Some("d0")).as_deref(), Ok("d0"));
        assert!(drained(&reply(&[]), Some("d7")).is_err_and(|error| error.contains("d0, d1")));
    }
}
