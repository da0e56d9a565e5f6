//! The exchange that the queues of a disk in a qcow2 image share with the thread that owns the image. Other
//! code in a model (bookkeeping over `std`) is no step of its own.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use shuttle::sync::mpsc::{Receiver, SyncSender, sync_channel};
use shuttle::thread::{self, JoinHandle};

use crate::exchange::{End, Event, Exchange, Job, Work};
use crate::{every_order, few_preemptions};

struct Request {
    number: u32,
    memory_is_gone: Arc<AtomicBool>,
    done: bool,
}

/// The memory of a queue's requests: gone once this is dropped.
#[derive(Default)]
struct Memory {
    gone: Arc<AtomicBool>,
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.gone.store(true, SeqCst);
    }
}

/// The events of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Done(u32),
    Closed,
}

#[derive(Clone, Default)]
struct Steps(Arc<Mutex<Vec<Step>>>);

impl Steps {
    fn push(&self, step: Step) {
        self.0.lock().unwrap().push(step);
    }

    fn are(&self, steps: &[Step]) {
        assert_eq!(*self.0.lock().unwrap(), steps);
    }

    /// Each of these is done, in any order, and then it is closed.
    fn are_all_of(&self, numbers: &[u32]) {
        let mut steps = self.0.lock().unwrap();
        assert_eq!(steps.pop(), Some(Step::Closed));
        steps.sort();
        assert!(steps.iter().copied().eq(numbers.iter().copied().map(Step::Done)), "{steps:?}");
    }

    /// As [`Steps::are_all_of`], but of the first two only one is done.
    fn are_all_but_one_of(&self, one_of: [u32; 2], numbers: &[u32]) {
        let first = self.0.lock().unwrap().contains(&Step::Done(one_of[0]));
        let one = one_of[usize::from(!first)];
        let mut all = [numbers, &[one]].concat();
        all.sort_unstable();
        self.are_all_of(&all);
    }
}

/// How many threads were started since the image was opened.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// How many attempts to start a thread fail before one succeeds.
static SCARCE: AtomicU32 = AtomicU32::new(0);

struct Image(Steps);

impl Work for Image {
    type Request = Request;
    type Event = Told;

    fn batch(&self) -> usize {
        2
    }

    fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        if SCARCE.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)).is_ok() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        STARTED.fetch_add(1, SeqCst);
        thread::Builder::new().spawn(run)
    }

    fn perform(&mut self, batch: &mut [Job<Self>]) {
        assert!((1..=self.batch()).contains(&batch.len()), "a batch of {}", batch.len());
        for Job { request, .. } in batch {
            assert!(!request.memory_is_gone.load(SeqCst), "the memory is used and gone");
            assert!(!request.done, "done twice");
            request.done = true;
            self.0.push(Step::Done(request.number));
        }
    }

    fn close(self) {
        self.0.push(Step::Closed);
    }
}

/// An eventfd: each call is one step.
struct Told {
    set: SyncSender<()>,
    /// Of one queue only.
    read: Mutex<Receiver<()>>,
}

impl Told {
    fn new() -> Self {
        let (set, read) = sync_channel(1);
        Self { set, read: Mutex::new(read) }
    }

    /// Sleeps until it is set.
    fn sleep(&self) {
        self.read.lock().unwrap().recv().unwrap();
    }
}

impl Event for Told {
    fn set(&self) {
        let _ = self.set.try_send(());
    }

    fn clear(&self) {
        let _ = self.read.lock().unwrap().try_recv();
    }
}

type Disk = Arc<Exchange<Image>>;

fn open() -> (Disk, Steps) {
    let steps = Steps::default();
    STARTED.store(0, SeqCst);
    SCARCE.store(0, SeqCst);
    (Arc::new(Exchange::new(Image(steps.clone()))), steps)
}

/// A queue of a disk. Its fields are dropped in this order.
struct Queue {
    end: End<Image>,
    memory: Memory,
}

impl Queue {
    fn new(disk: &Disk) -> Self {
        Self { end: disk.end(Told::new()), memory: Memory::default() }
    }

    fn push(&mut self, numbers: &[u32]) {
        for number in numbers {
            let (number, memory_is_gone) = (*number, Arc::clone(&self.memory.gone));
            self.end.push(Request { number, memory_is_gone, done: false });
        }
    }

    fn hand_over(&mut self, numbers: &[u32]) {
        self.push(numbers);
        self.end.hand_over().unwrap();
    }

    /// Hands over a request that is refused if there is no thread, and then another.
    fn ask_twice(&mut self, first: u32, then: u32) {
        self.push(&[first]);
        if self.end.hand_over().is_ok() {
            self.expect(&[first]);
        } else {
            // It is its answer then: a refused request never reaches the image.
            self.end.refuse(|request| request.done = true);
            assert_eq!(self.collect(), [first]);
        }
        self.hand_over(&[then]);
        self.expect(&[then]);
    }

    fn collect(&mut self) -> Vec<u32> {
        let done = self.end.collect();
        done.inspect(|request| assert!(request.done, "answered before it is done"))
            .map(|request| request.number)
            .collect()
    }

    /// Sleeps whenever there is nothing, until it has the answers to these requests.
    fn expect(&mut self, numbers: &[u32]) {
        let mut answered = self.collect();
        while answered.len() < numbers.len() {
            self.end.event().sleep();
            answered.extend(self.collect());
        }
        assert_eq!(answered, numbers);
    }
}

pub fn a_queue_that_sleeps_until_it_is_woken_is_woken() {
    every_order(|| {
        let (disk, steps) = open();
        let mut queue = Queue::new(&disk);
        queue.hand_over(&[1]);
        queue.expect(&[1]);
        drop((disk, queue));
        steps.are(&[Step::Done(1), Step::Closed]);
    });
}

pub fn two_queues_that_sleep_until_they_are_woken_get_each_answer_once() {
    few_preemptions(3, || {
        let (disk, steps) = open();
        let ask = |number| {
            let mut queue = Queue::new(&disk);
            thread::spawn(move || {
                queue.hand_over(&[number]);
                queue.expect(&[number]);
            })
        };
        let queues = [1, 2].map(ask);
        drop(disk);
        queues.into_iter().for_each(|queue| queue.join().unwrap());
        assert_eq!(STARTED.load(SeqCst), 1);
        steps.are_all_of(&[1, 2]);
    });
}

pub fn a_queue_that_asks_while_it_is_answered_misses_nothing() {
    few_preemptions(5, || {
        let (disk, steps) = open();
        let mut queue = Queue::new(&disk);
        queue.hand_over(&[1]);
        queue.hand_over(&[2]);
        queue.expect(&[1, 2]);
        queue.hand_over(&[3]);
        queue.expect(&[3]);
        drop((disk, queue));
        steps.are(&[Step::Done(1), Step::Done(2), Step::Done(3), Step::Closed]);
    });
}

pub fn more_than_a_batch_is_done_to_the_last() {
    few_preemptions(6, || {
        let (disk, steps) = open();
        let mut queue = Queue::new(&disk);
        queue.hand_over(&[1, 2, 3]);
        queue.expect(&[1, 2, 3]);
        drop((disk, queue));
        steps.are(&[Step::Done(1), Step::Done(2), Step::Done(3), Step::Closed]);
    });
}

pub fn a_queue_that_goes_waits_for_what_uses_its_memory() {
    few_preemptions(6, || {
        let (disk, steps) = open();
        let mut queue = Queue::new(&disk);
        queue.hand_over(&[1, 2, 3]);
        // It does not wait for the answers that it has by now.
        queue.collect();
        drop(queue);
        steps.are(&[Step::Done(1), Step::Done(2), Step::Done(3)]);
        drop(disk);
    });
}

pub fn an_image_is_closed_once_after_the_last_request() {
    few_preemptions(4, || {
        let (disk, steps) = open();
        let (mut queue, idle) = (Queue::new(&disk), Queue::new(&disk));
        drop(disk);
        let queues = [thread::spawn(move || queue.hand_over(&[1])), thread::spawn(|| drop(idle))];
        queues.into_iter().for_each(|queue| queue.join().unwrap());
        steps.are(&[Step::Done(1), Step::Closed]);
    });
}

pub fn an_image_of_which_nobody_asked_anything_is_closed_without_a_thread() {
    every_order(|| {
        let (disk, steps) = open();
        let queues = [(); 2].map(|()| Queue::new(&disk));
        drop(disk);
        let queues = queues.map(|mut queue| thread::spawn(move || queue.expect(&[])));
        queues.into_iter().for_each(|queue| queue.join().unwrap());
        steps.are(&[Step::Closed]);
        assert_eq!(STARTED.load(SeqCst), 0);
    });
}

pub fn without_a_thread_a_request_is_refused_once_and_the_next_is_done() {
    few_preemptions(3, || {
        let (disk, steps) = open();
        SCARCE.store(1, SeqCst);
        let mut queue = Queue::new(&disk);
        let other = Queue::new(&disk);
        drop(disk);
        let other = thread::spawn(|| drop(other));
        queue.ask_twice(1, 2);
        drop(queue);
        other.join().unwrap();
        assert_eq!(STARTED.load(SeqCst), 1);
        steps.are(&[Step::Done(2), Step::Closed]);
    });
}

pub fn one_queue_is_refused_and_another_that_finds_a_thread_is_not() {
    few_preemptions(2, || {
        let (disk, steps) = open();
        SCARCE.store(1, SeqCst);
        let ask = |first, then| {
            let mut queue = Queue::new(&disk);
            thread::spawn(move || queue.ask_twice(first, then))
        };
        let queues = [ask(1, 2), ask(3, 4)];
        drop(disk);
        queues.into_iter().for_each(|queue| queue.join().unwrap());
        assert_eq!(STARTED.load(SeqCst), 1);
        steps.are_all_but_one_of([1, 3], &[2, 4]);
    });
}
