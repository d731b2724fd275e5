//! Tests of writes that a ticket does not allow, and of blocks written by an attacker that has a ticket.

use super::{receiving::reserved, *};

impl World {
    fn refused(&self, job: JobId) -> Option<WriteRefused> {
        self.events[&job].iter().find_map(|event| match event {
            Event::WriteRefused(why) => Some(*why),
            _ => None,
        })
    }

    fn overlap(&self, prompt: &[TokenId]) -> u32 {
        self.machine.cache.overlap(&namespace(), prompt, 100)
    }
}

type Wrong = fn(&mut World, Ticket, &[u8]) -> Result<(), WriteRefused>;

#[test]
fn refused_write_ends_reservation_and_drops_received_blocks() {
    let wrong: [(WriteRefused, Wrong); 9] = [
        (WriteRefused::NotMissing, |world, ticket, block| world.write(ticket, 0, block)),
        (WriteRefused::NotMissing, |world, ticket, block| world.write(ticket, 7, block)),
        (WriteRefused::NotMissing, |world, ticket, block| world.write(ticket, u32::MAX, block)),
        (WriteRefused::WrongSize, |world, ticket, block| world.write(ticket, 3, &block[1..])),
        (WriteRefused::WrongSize, |world, ticket, block| world.write(ticket, 3, &[block, &[0]].concat())),
        (WriteRefused::NotMissing, |world, ticket, _| world.begin(ticket, &[0, 3]).map(drop)),
        (WriteRefused::NotMissing, |world, ticket, _| world.begin(ticket, &[3, 3]).map(drop)),
        (WriteRefused::NotMissing, |world, ticket, _| world.begin(ticket, &[3, 7]).map(drop)),
        (WriteRefused::WrongPath, |world, ticket, _| Err(world.machine.refuse(ticket, WriteRefused::WrongPath))),
    ];
    for (why, wrong) in wrong {
        let mut world = World::new(64, SETTINGS);
        let (job, ticket) = reserved(&mut world);
        let blocks = kv(&job.prompt);
        let other = Generate { kv: KvSource::Remote, ..generate(prompt("another", 100), 8) };
        world.machine.generate(1, other.clone(), world.now).expect("the job fits in the cache");
        world.step();
        let (other_ticket, _) = world.reserved(1).expect("blocks are available");
        for index in [0, 1, 2] {
            world.write(ticket, index, &blocks[index as usize].1).expect("the reservation still needs the block");
        }
        assert_eq!(wrong(&mut world, ticket, &blocks[3].1), Err(why));
        world.act();
        assert_eq!((world.refused(0), world.ended.as_slice()), (Some(why), &[0][..]));
        assert_eq!(
            (world.machine.load().in_use_blocks, world.overlap(&job.prompt)),
            (7, 0),
            "only the other reservation's blocks are in use"
        );
        assert_eq!(world.write(ticket, 4, &blocks[4].1), Err(WriteRefused::SpentTicket), "late blocks of the sender are refused");
        world.confirm(ticket);
        for (index, payload) in kv(&other.prompt) {
            world.write(other_ticket, index, &payload).expect("the other reservation is unaffected");
        }
        world.confirm(other_ticket);
        world.run();
        assert_eq!(world.tokens(1, 0), alone(other).swap_remove(0));
        world.assert_idle();
    }
}

#[test]
fn unknown_ticket_is_refused_and_ends_no_reservation() {
    let mut world = World::new(64, SETTINGS);
    let (job, ticket) = reserved(&mut world);
    let mut guess = *ticket.as_bytes();
    guess[15] ^= 1;
    let garbage = vec![0xAA; world.engine.describe().block_bytes];
    for guess in [guess, [0; 16], [255; 16]].map(Ticket::from_bytes) {
        assert_eq!(world.write(guess, 0, &garbage), Err(WriteRefused::UnknownTicket));
        assert!(matches!(world.begin(guess, &[0, 1]), Err(WriteRefused::UnknownTicket)));
        assert_eq!(world.machine.refuse(guess, WriteRefused::WrongPath), WriteRefused::UnknownTicket);
    }
    for (index, payload) in kv(&job.prompt) {
        world.write(ticket, index, &payload).expect("the reservation is unaffected");
    }
    world.confirm(ticket);
    world.run();
    assert_eq!(world.tokens(0, 0), alone(job).swap_remove(0));
    world.assert_idle();
}

#[test]
fn unconfirmed_blocks_are_neither_used_nor_cached() {
    let mut world = World::new(64, SETTINGS);
    let (job, ticket) = reserved(&mut world);
    let garbage = vec![0xAA; world.engine.describe().block_bytes];
    for index in 0..7 {
        world.write(ticket, index, &garbage).expect("a valid ticket allows the write");
    }
    world.run();
    assert!(!world.started(0));
    assert_eq!(world.overlap(&job.prompt), 0);
    world.machine.cancel(0);
    let next = generate(job.prompt.clone(), 8);
    world.machine.generate(1, next.clone(), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!((world.cached(1), world.tokens(1, 0)), (Some(0), alone(next).swap_remove(0)));
    world.assert_idle();
}

#[test]
fn reservation_ended_by_a_refused_write_keeps_blocks_being_written() {
    let mut world = World::new(64, SETTINGS);
    let (job, ticket) = reserved(&mut world);
    let writing = world.begin(ticket, &[2, 4]).expect("the reservation still needs both blocks");
    assert_eq!(world.write(ticket, 4, &kv(&job.prompt)[4].1), Err(WriteRefused::NotMissing));
    assert_eq!((world.refused(0), world.machine.load().in_use_blocks), (Some(WriteRefused::NotMissing), 2));
    world.end(writing, &[], true);
    world.assert_idle();
}

#[test]
fn number_of_kept_spent_tickets_is_bounded() {
    let mut world = World::new(64, SETTINGS);
    let mut tickets = Vec::new();
    for job in 0..1_025 {
        let remote = Generate { kv: KvSource::Remote, ..generate(prompt("leaves", 40), 1) };
        world.machine.generate(job, remote, world.now).expect("the job fits in the cache");
        world.step();
        tickets.push(world.reserved(job).expect("blocks are available").0);
        world.machine.cancel(job);
    }
    let garbage = vec![0; world.engine.describe().block_bytes];
    assert_eq!(world.write(tickets[1], 0, &garbage), Err(WriteRefused::SpentTicket));
    assert_eq!(
        world.write(tickets[0], 0, &garbage),
        Err(WriteRefused::UnknownTicket),
        "the oldest of 1,025 spent tickets is forgotten"
    );
    world.assert_idle();
}
