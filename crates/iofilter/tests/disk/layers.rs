//! The filters that delay, lose and break requests: what they do, and that nothing else is lost,
//! whatever is above and below them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmseal_api::filter::{
    Budget, DelaySpec, FaultKind, FaultRange, FaultRule, FaultSpec, FilterSpec, Holes, LimitSpec,
    OperationKind,
};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::layer::Layer;
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

use crate::waiting;

const SIZE: u64 = 1 << 20;
const SECTOR: u64 = 4096;

fn layers(spec: &FilterSpec) -> Vec<Arc<dyn Layer>> {
    vec![layers::of(spec).unwrap()]
}

fn disk(mem: &MemDisk, above: Vec<Arc<dyn Layer>>, below: Vec<Arc<dyn Layer>>) -> Disk {
    let mut key: Vec<u8> = (0..64).collect();
    let key = SecretBytes::from_wiped(&mut key).unwrap();
    let encryption = Some(Encryption { key, holes: Holes::Zero });
    Disk::new(SIZE, false, encryption, DiskStorage::Mem(mem.clone()), 1).with_layers(above, below)
}

fn begin(chain: &mut Chain, operation: Operation, offset: u64, bytes: &mut [u8], tag: u64) {
    let id = chain.begin().unwrap();
    // SAFETY: every test drains the chain before its buffers go.
    chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    chain.submit(id, operation, offset, bytes.len() as u64, tag);
}

/// Does one request, to its end.
fn run(
    chain: &mut Chain,
    operation: Operation,
    offset: u64,
    bytes: &mut [u8],
) -> Result<(), IoError> {
    begin(chain, operation, offset, bytes, 0);
    loop {
        chain.poll();
        if let Some(done) = chain.next_done() {
            return done.result;
        }
        waiting::sleep([&mut *chain]);
    }
}

fn read(chain: &mut Chain, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; length as usize];
    run(chain, Operation::Read, offset, &mut bytes).unwrap();
    bytes
}

fn counter(layer: &Arc<dyn Layer>, name: &str) -> u64 {
    layer.counters().into_iter().find(|(one, _)| *one == name).unwrap().1
}

#[test]
fn no_more_goes_than_the_limit_has_and_all_of_it_in_the_end() {
    let budget = Budget { per_second: 200, burst: 10 };
    let limit = layers(&FilterSpec::Limit(LimitSpec { requests: Some(budget), bytes: None }));
    let mem = MemDisk::new(SIZE as usize);
    let disk = disk(&mem, limit.clone(), Vec::new());
    // Two queues share the budget.
    let mut chains = [disk.chain().unwrap(), disk.chain().unwrap()];
    let mut buffers: Vec<Vec<u8>> = (1..=60).map(|fill| vec![fill; SECTOR as usize]).collect();
    let begun = Instant::now();
    for (index, buffer) in buffers.iter_mut().enumerate() {
        let at = index as u64 * SECTOR;
        begin(&mut chains[index % 2], Operation::Write, at, buffer, index as u64);
    }
    let mut done = Vec::new();
    while done.len() < 60 {
        for chain in &mut chains {
            chain.poll();
            while let Some(one) = chain.next_done() {
                one.result.unwrap();
                done.push(begun.elapsed());
            }
        }
        waiting::sleep(&mut chains);
    }
    // However slow the machine is, it cannot be faster than the budget; two queues may each be ahead by
    // the one request that both asked for at the same instant.
    for (count, at) in done.iter().enumerate() {
        let earned = at.as_secs_f64() * 200.0 + 10.0;
        assert!(count as f64 <= earned + 1.0, "{count} were done after {at:?}");
    }
    assert!(counter(&limit[0], "held_requests") >= 45);
    assert!(counter(&limit[0], "held_nanoseconds") > 0);
    for (index, buffer) in buffers.iter().enumerate() {
        assert_eq!(read(&mut chains[0], index as u64 * SECTOR, SECTOR), *buffer);
    }
}

#[test]
fn a_chain_that_is_drained_waits_for_no_budget_and_no_delay() {
    let hour = Budget { per_second: 1, burst: 1 };
    let limit = FilterSpec::Limit(LimitSpec { requests: None, bytes: Some(hour) });
    let delay = FilterSpec::Delay(DelaySpec {
        operations: vec![OperationKind::Write],
        microseconds: 60_000_000,
        jitter_microseconds: 0,
        reorders: false,
        seed: 0,
    });
    let mem = MemDisk::new(SIZE as usize);
    let disk = disk(&mem, layers(&limit), layers(&delay));
    let mut chain = disk.chain().unwrap();
    let mut buffers = vec![vec![7; SECTOR as usize]; 20];
    for (index, buffer) in buffers.iter_mut().enumerate() {
        begin(&mut chain, Operation::Write, index as u64 * SECTOR, buffer, 0);
    }
    chain.poll();
    assert_eq!(chain.next_done().map(|done| done.result), None, "nothing is due");
    assert!(chain.deadline().is_some());
    chain.hasten(true);
    let mut done = 0;
    while chain.in_flight() > 0 {
        chain.poll();
        while let Some(one) = chain.next_done() {
            one.result.unwrap();
            done += 1;
        }
        waiting::sleep([&mut chain]);
    }
    assert_eq!(done, 20);
}

#[test]
fn delayed_requests_come_late_and_others_do_not() {
    let spec = FilterSpec::Delay(DelaySpec {
        operations: vec![OperationKind::Write],
        microseconds: 30_000,
        jitter_microseconds: 30_000,
        reorders: false,
        seed: 1,
    });
    let delay = layers(&spec);
    let mem = MemDisk::new(SIZE as usize);
    let mut chain = disk(&mem, Vec::new(), delay.clone()).chain().unwrap();
    let begun = Instant::now();
    run(&mut chain, Operation::Write, 0, &mut vec![1; SECTOR as usize]).unwrap();
    assert!(begun.elapsed() >= Duration::from_millis(30));
    assert_eq!(counter(&delay[0], "delayed_requests"), 1);
    assert_eq!(read(&mut chain, 0, SECTOR), vec![1; SECTOR as usize]);
    assert_eq!(counter(&delay[0], "delayed_requests"), 1, "reads are not delayed");
    // With jitter they overtake each other, and each is done once.
    let mut buffers: Vec<Vec<u8>> = (1..=30).map(|fill| vec![fill; SECTOR as usize]).collect();
    for (index, buffer) in buffers.iter_mut().enumerate() {
        begin(&mut chain, Operation::Write, index as u64 * SECTOR, buffer, index as u64);
    }
    let mut order = Vec::new();
    while chain.in_flight() > 0 {
        chain.poll();
        while let Some(done) = chain.next_done() {
            order.push(done.tag);
        }
        waiting::sleep([&mut chain]);
    }
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..30).collect::<Vec<_>>());
    assert_ne!(sorted, order, "nothing was reordered");
    for (index, buffer) in buffers.iter().enumerate() {
        assert_eq!(read(&mut chain, index as u64 * SECTOR, SECTOR), *buffer);
    }
}

fn rule(kind: FaultKind, operations: &[OperationKind]) -> FaultRule {
    let operations = operations.to_vec();
    FaultRule { operations, range: None, after: 0, one_in: 1, times: None, kind }
}

fn faulty(mem: &MemDisk, seed: u64, rules: Vec<FaultRule>) -> (Chain, Arc<dyn Layer>) {
    let fault = layers(&FilterSpec::Fault(FaultSpec { seed, rules }));
    (disk(mem, Vec::new(), fault.clone()).chain().unwrap(), Arc::clone(&fault[0]))
}

#[test]
fn a_fault_strikes_its_operations_its_range_and_as_often_as_told() {
    let mem = MemDisk::new(SIZE as usize);
    let error = FaultKind::Error { errno: libc::ENOSPC };
    let rules = vec![FaultRule {
        range: Some(FaultRange { offset: 8 * SECTOR, length: SECTOR }),
        after: 1,
        times: Some(2),
        ..rule(error, &[OperationKind::Write])
    }];
    let (mut chain, fault) = faulty(&mem, 0, rules);
    let mut bytes = vec![3; 2 * SECTOR as usize];
    let mut write = |at: u64| run(&mut chain, Operation::Write, at * SECTOR, &mut bytes);
    assert_eq!(write(9), Ok(()), "behind the range");
    assert_eq!(write(6), Ok(()), "before the range");
    assert_eq!(write(8), Ok(()), "the first is spared");
    assert_eq!(write(7), Err(IoError::NoSpace), "it reaches into the range");
    assert_eq!(write(8), Err(IoError::NoSpace));
    assert_eq!(write(8), Ok(()), "it struck twice already");
    assert_eq!(fault.counters(), [("errors", 2), ("torn_writes", 0), ("lost_requests", 0)]);
}

#[test]
fn a_torn_write_is_half_there_and_an_error() {
    let mem = MemDisk::new(SIZE as usize);
    let torn = FaultRule { after: 1, ..rule(FaultKind::Torn, &[OperationKind::Write]) };
    let (mut chain, fault) = faulty(&mem, 0, vec![torn]);
    let length = 6 * SECTOR as usize;
    run(&mut chain, Operation::Write, 0, &mut vec![1; length]).unwrap();
    let failed = run(&mut chain, Operation::Write, 0, &mut vec![2; length]);
    assert_eq!(failed, Err(IoError::Device(libc::EIO)));
    let half = [vec![2; length / 2], vec![1; length / 2]].concat();
    assert!(read(&mut chain, 0, length as u64) == half);
    let failed = run(&mut chain, Operation::Write, 0, &mut vec![5; SECTOR as usize]);
    assert_eq!(failed, Err(IoError::Device(libc::EIO)), "too short to be halved");
    assert!(read(&mut chain, 0, SECTOR) == vec![2; SECTOR as usize]);
    assert_eq!(counter(&fault, "torn_writes"), 2);
}

#[test]
fn a_lost_write_is_answered_and_not_there() {
    let mem = MemDisk::new(SIZE as usize);
    let lost = rule(FaultKind::Lost, &[OperationKind::Write]);
    let (mut chain, fault) = faulty(&mem, 0, vec![FaultRule { times: Some(1), ..lost }]);
    run(&mut chain, Operation::Write, 0, &mut vec![1; SECTOR as usize]).unwrap();
    assert!(read(&mut chain, 0, SECTOR) == vec![0; SECTOR as usize]);
    run(&mut chain, Operation::Write, 0, &mut vec![1; SECTOR as usize]).unwrap();
    assert!(read(&mut chain, 0, SECTOR) == vec![1; SECTOR as usize]);
    assert_eq!(counter(&fault, "lost_requests"), 1);
}

#[test]
fn the_same_seed_strikes_the_same_requests() {
    let struck = |seed: u64| -> Vec<bool> {
        let mem = MemDisk::new(SIZE as usize);
        let error = FaultKind::Error { errno: libc::EIO };
        let rules = vec![FaultRule { one_in: 5, ..rule(error, &[OperationKind::Write]) }];
        let (mut chain, _) = faulty(&mem, seed, rules);
        let mut bytes = vec![1; SECTOR as usize];
        (0..200).map(|_| run(&mut chain, Operation::Write, 0, &mut bytes).is_err()).collect()
    };
    let first = struck(7);
    assert_eq!(first, struck(7));
    assert_ne!(first, struck(8));
    let count = first.iter().filter(|struck| **struck).count();
    assert!((10..=90).contains(&count), "{count} of 200 at one in five");
}
