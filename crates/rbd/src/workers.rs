//! Threads for requests that wait for the cluster, so that those who take requests from the kernel never do.
//!
//! ```text
//!  a request about an object ──> fewer than OF_ONE of them are at work ──> ready ──> a thread, of so many at most
//!                                 └──else──> waits for one of them to end ─────┘
//! ```
//! Where the placement group of an object is not active, requests about it keep OF_ONE threads, however many there are.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::inode::Inode;

/// How many requests about one object are at work at a time: as many as there are threads that take requests.
const OF_ONE: usize = 4;

/// The stack of a thread, in bytes. Lists of those who have locks are on it (64 KiB), and the library looks for an object's place there.
const STACK: usize = 1 << 20;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that do what they are given, until this is dropped; what they have been given by then is done all the same.
pub struct Workers(Arc<Shared>);

struct Shared {
    name: &'static str,
    most: usize,
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    /// What a thread is to do next.
    ready: VecDeque<(Inode, Job)>,
    objects: HashMap<Inode, OfObject>,
    threads: usize,
    /// Threads that have nothing to do.
    idle: usize,
    ended: bool,
}

/// The requests about an object.
#[derive(Default)]
struct OfObject {
    /// Those that are ready or at work.
    begun: usize,
    waiting: VecDeque<Job>,
}

/// A thread, until it ends, also by a defect.
struct Thread(Arc<Shared>);

/// A request at work, until this is dropped, also where it ends by a defect.
struct AtWork<'a> {
    shared: &'a Shared,
    about: Inode,
}

impl Workers {
    /// At most so many threads; the first one is started at once, so that there always is one.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn new(name: &'static str, most: usize) -> io::Result<Self> {
        let (state, work) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { name, most, state, work });
        shared.start(&mut shared.state())?;
        Ok(Self(shared))
    }

    /// Has a thread do something about an object. It never waits.
    pub fn run(&self, about: Inode, job: impl FnOnce() + Send + 'static) {
        let shared = &self.0;
        let mut state = shared.state();
        if !state.take(about, Box::new(job)) {
            return;
        }
        if state.ready.len() > state.idle
            && state.threads < shared.most
            && let Err(error) = shared.start(&mut state)
        {
            tracing::warn!(name = shared.name, %error, "a request waits for others: there is no thread");
        }
        shared.work.notify_one();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.0.state().ended = true;
        self.0.work.notify_all();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let shared = Arc::clone(self);
        let work = move || Thread(shared).work();
        std::thread::Builder::new().name(self.name.into()).stack_size(STACK).spawn(work)?;
        state.threads += 1;
        Ok(())
    }

    /// What a thread is to do next; none where it is to end.
    fn next(&self) -> Option<(Inode, Job)> {
        let mut state = self.state();
        loop {
            if let Some(next) = state.ready.pop_front() {
                return Some(next);
            }
            if state.ended {
                return None;
            }
            state.idle += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

impl State {
    /// Takes a request; whether it is ready.
    fn take(&mut self, about: Inode, job: Job) -> bool {
        let object = self.objects.entry(about).or_default();
        if object.begun >= OF_ONE {
            object.waiting.push_back(job);
            return false;
        }
        object.begun += 1;
        self.ready.push_back((about, job));
        true
    }

    /// A request about an object has ended: the next one is ready. The thread that did it comes for another.
    fn end(&mut self, about: Inode) {
        let Some(object) = self.objects.get_mut(&about) else { return };
        if let Some(next) = object.waiting.pop_front() {
            self.ready.push_back((about, next));
            return;
        }
        object.begun -= 1;
        if object.begun == 0 {
            self.objects.remove(&about);
        }
    }
}

impl Thread {
    fn work(&self) {
        while let Some((about, job)) = self.0.next() {
            let _at_work = AtWork { shared: &self.0, about };
            job();
        }
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.threads -= 1;
        // It was a defect: what is ready does not wait for the next request.
        if !state.ready.is_empty()
            && let Err(error) = self.0.start(&mut state)
        {
            tracing::warn!(name = self.0.name, %error, "requests wait for the next one: there is no thread");
        }
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        self.shared.state().end(self.about);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver, Sender};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(60);

    /// Gives a job that says that it has begun, and ends when the sender is dropped.
    fn hangs(workers: &Workers, about: Inode, begun: &Sender<Inode>) -> Sender<()> {
        let (let_go, goes) = mpsc::channel::<()>();
        let begun = begun.clone();
        workers.run(about, move || {
            begun.send(about).unwrap();
            let _ = goes.recv();
        });
        let_go
    }

    fn next(begun: &Receiver<Inode>) -> Inode {
        begun.recv_timeout(SOON).unwrap()
    }

    #[test]
    fn an_object_that_hangs_keeps_few_threads_whatever_is_asked_about_it() {
        let workers = Workers::new("test", OF_ONE + 1).unwrap();
        let (tell, begun) = mpsc::channel();
        let stuck: Vec<_> = (0..3 * OF_ONE).map(|_| hangs(&workers, Inode(2), &tell)).collect();
        (0..OF_ONE).for_each(|_| assert_eq!(next(&begun), Inode(2)));
        // There is one thread more, which all others have.
        for other in 4..20 {
            drop(hangs(&workers, Inode(other), &tell));
            assert_eq!(next(&begun), Inode(other));
        }
        drop(stuck);
        (OF_ONE..3 * OF_ONE).for_each(|_| assert_eq!(next(&begun), Inode(2)));
        while !workers.0.state().objects.is_empty() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn requests_that_go_on_about_an_object_that_hangs_keep_no_threads_from_the_first_one() {
        let workers = Arc::new(Workers::new("test", OF_ONE + 1).unwrap());
        let (tell, begun) = mpsc::channel();
        let look_up = |_| {
            let (let_go, goes) = mpsc::channel::<()>();
            let (again, tell) = (Arc::clone(&workers), tell.clone());
            workers.run(Inode(2), move || {
                again.run(Inode(4), move || {
                    tell.send(Inode(4)).unwrap();
                    let _ = goes.recv();
                });
            });
            let_go
        };
        let stuck: Vec<_> = (0..2 * OF_ONE).map(look_up).collect();
        (0..OF_ONE).for_each(|_| assert_eq!(next(&begun), Inode(4)));
        drop(hangs(&workers, Inode(2), &tell));
        assert_eq!(next(&begun), Inode(2));
        drop(stuck);
        (OF_ONE..2 * OF_ONE).for_each(|_| assert_eq!(next(&begun), Inode(4)));
    }

    #[test]
    fn there_are_so_many_threads_and_the_next_request_begins_when_one_ends() {
        let workers = Workers::new("test", 3).unwrap();
        let (tell, begun) = mpsc::channel();
        let mut stuck: Vec<_> =
            (2..5).map(|number| hangs(&workers, Inode(number), &tell)).collect();
        (2..5).for_each(|_| assert!(next(&begun) < Inode(5)));
        drop(hangs(&workers, Inode(9), &tell));
        assert_eq!(workers.0.state().threads, 3);
        assert_eq!(workers.0.state().ready.len(), 1, "a fourth one has begun");
        drop(stuck.pop());
        assert_eq!(next(&begun), Inode(9));
    }

    #[test]
    fn a_defect_of_one_request_keeps_no_others_from_being_done() {
        let workers = Workers::new("test", 1).unwrap();
        let (let_go, goes) = mpsc::channel::<()>();
        workers.run(Inode(2), move || {
            let _ = goes.recv();
            panic!("a defect of a test");
        });
        let (tell, begun) = mpsc::channel();
        drop(hangs(&workers, Inode(4), &tell));
        drop(let_go);
        assert_eq!(next(&begun), Inode(4));
        while !workers.0.state().objects.is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(workers.0.state().threads, 1);
    }

    #[test]
    fn what_was_given_is_done_also_when_nothing_more_will_be() {
        let workers = Workers::new("test", 1).unwrap();
        let (tell, begun) = mpsc::channel();
        let first = hangs(&workers, Inode(2), &tell);
        drop(hangs(&workers, Inode(4), &tell));
        drop((workers, tell));
        drop(first);
        assert_eq!((next(&begun), next(&begun)), (Inode(2), Inode(4)));
        // The threads end, and with them the last sender.
        assert_eq!(begun.recv_timeout(SOON), Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
