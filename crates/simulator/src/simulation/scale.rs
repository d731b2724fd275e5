//! Starts and drains workers as the rule of a cluster says.

use super::{Simulation, SimulationEvent, micros};
use crate::{scaling::Scaler, worker::SimulatedEngine};
use std::time::Duration;
use tandem_router::WANTED_INTERVAL;

impl Simulation<'_> {
    pub(super) fn schedule_scaling(&mut self, now: u64) {
        if self.scaler.is_some() {
            self.at(now + micros(WANTED_INTERVAL), SimulationEvent::Scale);
        }
    }

    /// Changes the numbers of workers as the rule says.
    pub(super) fn scale(&mut self, now: u64) {
        let Some(mut scaler) = self.scaler.take() else { return };
        let wanted = self.router.wanted();
        for at in 0..scaler.roles.len() {
            let role = scaler.roles[at];
            let present: Vec<usize> = (0..self.workers.len()).filter(|number| self.workers[*number].serves(role)).collect();
            let workers: Vec<&SimulatedEngine> = present.iter().map(|number| &self.workers[*number]).collect();
            let (wanted, cheapest) = scaler.decide(at, now, &wanted, &workers);
            let starting = scaler.starting.iter().filter(|(of, _)| *of == role).count();
            self.totals.changes += u64::from(wanted != present.len() + starting);
            for _ in present.len() + starting..wanted {
                let joins = now + micros(scaler.settings.start);
                scaler.starting.push_back((role, joins));
                self.at(joins, SimulationEvent::Started);
            }
            let mut surplus = (present.len() + starting).saturating_sub(wanted);
            while surplus > 0
                && let Some(last) = scaler.starting.iter().rposition(|(of, _)| *of == role)
            {
                let (_, joins) = scaler.starting.remove(last).expect("the position was found");
                self.totals.paid += Duration::from_micros(now - (joins - micros(scaler.settings.start)));
                surplus -= 1;
            }
            // The router names one worker at a time, so at most one is removed in an interval by its rule.
            let leaving: Vec<usize> = match cheapest {
                Some(cheapest) => vec![cheapest],
                None => present.into_iter().rev().collect(),
            };
            for number in leaving.into_iter().take(surplus) {
                self.workers[number].drains = true;
                self.router.leave(number);
                self.end_if_drained(now, number);
            }
        }
        self.scaler = Some(scaler);
        self.schedule_scaling(now);
    }

    /// Adds the worker that is due to join now, unless it is not wanted any more.
    pub(super) fn started(&mut self, now: u64) {
        let Some(scaler) = &mut self.scaler else { return };
        let Some(due) = scaler.starting.iter().position(|(_, joins)| *joins == now) else { return };
        let (role, _) = scaler.starting.remove(due).expect("the position was found");
        self.totals.paid += scaler.settings.start;
        self.add_worker(role, now);
    }

    /// Ends a worker that drains if it has no request any more.
    pub(super) fn end_if_drained(&mut self, now: u64, number: usize) {
        let worker = &mut self.workers[number];
        if worker.present && worker.drains && worker.is_idle() {
            worker.present = false;
            self.totals.paid += Duration::from_micros(now - worker.since);
        }
    }

    /// Returns the time for which the workers that are present, or starting, are paid until now.
    pub(super) fn paid_by_present(&self, now: u64) -> Duration {
        let present: u64 = self.workers.iter().filter(|worker| worker.present).map(|worker| now - worker.since).sum();
        let paid_by = |scaler: &Scaler| {
            let start = micros(scaler.settings.start);
            scaler.starting.iter().map(|(_, joins)| now - joins.saturating_sub(start)).sum::<u64>()
        };
        let started = self.scaler.as_ref().map_or(0, paid_by);
        Duration::from_micros(present + started)
    }
}
